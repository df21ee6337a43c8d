"""The `quire` command: one file per command; each wires options to the rooms below and prints.

Knows: everything. Refuses to hold logic of its own.
"""

from quire.cli.main import main

__all__ = ["main"]
