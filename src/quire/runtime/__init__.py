"""The worker: slot state on the device, the model runner, executors, and what the hardware allows.

Knows: the torch rooms. Refuses to know: requests, queues, text, sockets.
"""
