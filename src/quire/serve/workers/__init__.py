"""API workers: several processes that answer on one port, and the main process that starts, feeds and watches them.

Refuses to know: routes, API families.
"""
