"""Defaults of all policies: no displacement, requests that fit may pass, the engine's step target holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any

from quire.types.config import SchedulerOptions
from quire.types.policy import EventKind, PolicyEvent, PolicyServices, SequenceId, SequenceView


class Policy(ABC):
    """Decisions over views; the same events lead to the same decisions. Subclasses say how sequences are ordered."""

    observes: Collection[EventKind] = ()  # the kinds that `observe` wants to be told of
    uses_priority = False  # whether a request's priority has a meaning; where it has none, setting it is an error
    uses_lengths = False  # whether it looks at how long answers are expected to become
    late_last = False  # whether one that can no longer have its first token in time goes behind all others
    contiguous = False  # whether KV memory is reserved whole and in one piece: the allocator's affair
    starves = True  # whether its order alone could keep a request waiting for ever, so that `max_wait` must see to it

    def __init__(self, options: SchedulerOptions):
        self.options = options
        self.services: PolicyServices = NoServices()

    def attach(self, services: PolicyServices) -> None:
        """Before anything is asked of it."""
        self.services = services

    @abstractmethod
    def key(self, seq: SequenceView) -> tuple[Any, ...]:
        """Order of service, waiting and running alike: lower first, and whoever has the highest key is preempted first.
        It may change only when `observe` says so."""

    def displaces(self, waiting: SequenceView, running: SequenceView) -> bool:
        """Whether a running sequence is preempted because a waiting one cannot start otherwise."""
        return False

    def passes(self, blocked: SequenceView, behind: SequenceView) -> bool:
        """Whether a request that fits may be admitted before one ahead of it that does not. How often a request may be
        overtaken is bounded by the scheduler."""
        return True

    def defers(self, seq: SequenceView) -> bool:
        """Whether a sequence without a first token has time to leave slots to others while few are free: it does not
        start, or its prompt makes steps little longer."""
        return False

    def reserve(self, seq: SequenceView, longest: int) -> int:
        """In contiguous memory: tokens to set aside for a sequence that starts, of which one may have `longest`. 0: as
        much as the longest of its batch needs, and a batch starts when the last one has wholly ended."""
        return 0

    def latency_target(self, running: Iterable[SequenceView]) -> float | None:
        """Seconds that the next step may take, which bounds its prefill budget; None: the engine's step target."""
        return None

    def observe(self, event: PolicyEvent) -> Iterable[SequenceId]:
        """Take note; returns the sequences whose key changed."""
        return ()

    def gives_up(self, now: float) -> Iterable[str]:
        """Requests that shall end now, without an answer, because it would come too late."""
        return ()


class NoServices:
    """Of a policy without a scheduler: nothing is known."""

    def prefill_seconds(self, tokens: int, start: int = 0) -> float:
        return 0.0

    def matched(self, sequence: SequenceId) -> int:
        return 0

    def running(self) -> Iterable[SequenceView]:
        return ()
