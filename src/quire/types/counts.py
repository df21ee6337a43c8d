"""What it took to come to some tokens, counted: rides whole from the scheduler to whoever shows it."""

from __future__ import annotations

import msgspec


class Counts(msgspec.Struct, array_like=True, frozen=True):
    """Of one branch. `cached`, `blended` and `evicted` say what holds so far, so the larger is the later; the others
    are of the tokens they come with and add up. `+` does both."""

    cached: int = 0  # prompt tokens that needed no computing
    blended: int = 0  # prompt tokens whose KV was copied from another place: not exact, unless computed again
    evicted: int = 0  # tokens whose KV was dropped, to keep a budget
    forced: int = 0  # of the tokens drawn, how many a grammar forced: they took no step
    drafted: int = 0  # tokens drafted
    accepted: int = 0  # ... of them, accepted

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            max(self.cached, other.cached),
            max(self.blended, other.blended),
            max(self.evicted, other.evicted),
            self.forced + other.forced,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )


def added(first: Counts | None, second: Counts | None) -> Counts | None:
    """Both together, where None is nothing to count."""
    return first + second if first is not None and second is not None else first or second
