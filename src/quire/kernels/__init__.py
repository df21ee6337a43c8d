"""Signatures of the device operations, and their implementations beside each other.

`reference/` is plain torch, the oracle; faster twins carry the same signature and are tested against it.
Knows: torch, types. Refuses to know: models, requests, schedulers.
"""
