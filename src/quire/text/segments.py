"""What an answer consists of once its text is read: things said, things thought, calls of tools.

Refuses to know: who wrote it in which format, and who reads it.
"""

from __future__ import annotations

import msgspec


class Said(msgspec.Struct, frozen=True):
    text: str


class Thought(msgspec.Struct, frozen=True):
    text: str


class CallBegun(msgspec.Struct, frozen=True):
    index: int
    name: str
    id: str = ""  # where the model itself gave it one


class CallArguments(msgspec.Struct, frozen=True):
    """The next characters of a call's arguments, which together are JSON."""

    index: int
    text: str


Segment = Said | Thought | CallBegun | CallArguments


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1)) if marker else -1
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return len(text) - at if at >= 0 else 0
