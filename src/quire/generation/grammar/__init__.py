"""Constrained decoding: the backend, compiled grammars by slot, their cost limits, and a sandbox to try them in."""
