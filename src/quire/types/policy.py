"""The seam of scheduling policies: what a policy sees of sequences, what it is told, what it decides.

A policy decides everything about order that is a choice, over read-only views, and owns no queue. The scheduler keeps
the queues and the bounds: how often a request may be overtaken, how often a sequence may be preempted.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

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


class SchedulingPolicy(Protocol):
    """Decisions over views; the same events lead to the same decisions."""

    observes: Collection[EventKind]  # the kinds that `observe` wants to be told of

    def key(self, seq: SequenceView) -> tuple[Any, ...]:
        """Order of service, waiting and running alike: lower first, and whoever has the highest key is preempted first.
        It may change only when `observe` says so."""
        ...

    def displaces(self, waiting: SequenceView, running: SequenceView) -> bool:
        """Whether a running sequence is preempted because a waiting one cannot start otherwise."""
        ...

    def passes(self, blocked: SequenceView, behind: SequenceView) -> bool:
        """Whether a request that fits may be admitted before one ahead of it that does not. How often a request may be
        overtaken is bounded by the scheduler."""
        ...

    def latency_target(self, running: Collection[SequenceView]) -> float | None:
        """Seconds that the next step may take, which bounds its prefill budget; None: the engine's step target."""
        ...

    def observe(self, event: PolicyEvent) -> Iterable[SequenceId]:
        """Take note; returns the sequences whose key changed."""
        ...
