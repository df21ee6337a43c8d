"""Connectors: how KV pages go from one engine to another, one file each. They move and verify bytes; which pages, and
when, the scheduler decides."""
