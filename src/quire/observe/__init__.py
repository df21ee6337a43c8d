"""Numbers for operators, fed by events only.

Knows: the events and outputs of `types`. Refuses to know: engines, schedulers, HTTP, torch.
"""
