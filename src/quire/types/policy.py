"""The seam of scheduling policies: what a policy (`scheduling/policies/base.py`) sees of sequences and is told.

A policy decides everything about order that is a choice, over read-only views, and owns no queue. The scheduler keeps
the queues and the bounds: how often a request may be overtaken, how often a sequence may be preempted.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

SequenceId = int  # submission number: unique, and a total order where all else ties


class Expected(NamedTuple):
    """Output tokens that an answer is thought to come to: as many are likely, hardly more than `high`."""

    likely: float
    high: float


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

    @property
    def expected(self) -> Expected:
        """How long its answer is thought to become."""
        ...

    @property
    def ttft_target(self) -> float:
        """Seconds; 0: it has none of its own."""
        ...

    @property
    def tpot_target(self) -> float: ...
    @property
    def weight(self) -> float:
        """Its tenant's, among others'."""
        ...

    @property
    def background(self) -> bool:
        """Whether nobody waits for it: it runs below all that is interactive, whatever the policy."""
        ...


class PolicyServices(Protocol):
    """What a policy may ask of its scheduler."""

    def prefill_seconds(self, tokens: int, start: int = 0) -> float:
        """About how long so many prompt tokens take, from position `start` on, as of the latest steps."""
        ...

    def matched(self, sequence: SequenceId) -> int:
        """Tokens of a waiting sequence that are in the prefix cache now."""
        ...

    def running(self) -> Iterable[SequenceView]:
        """All that run."""
        ...


class EventKind(enum.Enum):
    ARRIVED = enum.auto()  # tokens of its prompt; 0: a beam that forked off another, whose rank it has
    ADMITTED = enum.auto()  # for the first time, or again; tokens of its prompt that were found in the prefix cache
    COMPUTED = enum.auto()  # token rows planned for it, with each step
    DREW = enum.auto()  # output tokens, with each step
    FIRST_TOKEN = enum.auto()  # ... for the first time
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()
    __hash__ = object.__hash__  # as fast as looking for them should be


class PolicyEvent(NamedTuple):
    """What happened to some sequences, with how many tokens each."""

    kind: EventKind
    now: float
    sequences: Sequence[tuple[SequenceView, int]]
