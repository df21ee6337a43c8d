"""An answer read as it comes: thoughts first, then words and calls of tools. Refuses to know: formats."""

from __future__ import annotations

from typing import Protocol

from quire.text.segments import Said, Segment


class Reader(Protocol):
    """Text in pieces, to what it consists of."""

    def push(self, text: str) -> list[Segment]: ...

    def end(self) -> list[Segment]: ...


class ChainedReader:
    """What the first says is read by the second."""

    def __init__(self, first: Reader, second: Reader):
        self._first = first
        self._second = second

    def push(self, text: str) -> list[Segment]:
        return self._read(self._first.push(text))

    def end(self) -> list[Segment]:
        return self._read(self._first.end()) + self._second.end()

    def _read(self, segments: list[Segment]) -> list[Segment]:
        read: list[Segment] = []
        for segment in segments:
            read += self._second.push(segment.text) if isinstance(segment, Said) else [segment]
        return read
