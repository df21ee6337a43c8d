"""Plain data every room shares: requests, plans, layouts, events, errors, configuration, seams.

Knows: the standard library, msgspec, numpy. Refuses to know: torch, sockets, files, any other room.
"""
