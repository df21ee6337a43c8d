"""The simulator: the real engine core, scheduler and KV memory on a virtual clock, over a device that is a cost model.

Refuses to know: torch, HTTP.
"""
