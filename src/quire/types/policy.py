"""The seam of scheduling policies: what a policy (`scheduling/policies/base.py`) sees of sequences and is told.

A policy decides everything about order that is a choice, over read-only views, and owns no queue. The scheduler keeps
the queues and the bounds: how often a request may be overtaken, how often a sequence may be preempted.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

SequenceId = int  # submission number: unique, and a total order where all else ties


class SequenceView(Protocol):
    """One sequence, read-only. Numbers are tokens unless said otherwise."""

    @property
    def id(self) -> SequenceId: ...
    @property
    def request(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def priority(self) -> int:
        """As the request says; lower is served earlier, where a policy looks at it."""
        ...

    @property
    def arrival(self) -> float:
        """Seconds, on the engine's clock."""
        ...

    @property
    def prompt(self) -> int: ...
    @property
    def cached(self) -> int:
        """Of the prompt, found in the prefix cache at first admission; -1: not admitted yet."""
        ...

    @property
    def computed(self) -> int:
        """KV entries it has now."""
        ...

    @property
    def drawn(self) -> int:
        """Output tokens so far."""
        ...

    @property
    def attained(self) -> int:
        """Service it has received: token rows computed for it, those lost to preemption included."""
        ...

    @property
    def remaining(self) -> int:
        """Most tokens that it may still draw."""
        ...

    @property
    def pages(self) -> int:
        """KV pages it holds."""
        ...


class EventKind(enum.Enum):
    ARRIVED = enum.auto()  # tokens of its prompt; 0: a beam that forked off another, whose rank it has
    COMPUTED = enum.auto()  # token rows planned for it, with each step
    DREW = enum.auto()  # output tokens, with each step
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class PolicyEvent(NamedTuple):
    """What happened to some sequences, with how many tokens each."""

    kind: EventKind
    now: float
    sequences: Sequence[tuple[SequenceView, int]]
