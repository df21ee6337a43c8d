"""HTTP: the APIs that users and their tools already speak, over one engine client.

Knows: text (templates, tokens), the client side of the engine, metrics. Refuses to know: torch, scheduling, memory,
how many engines there are.
"""
