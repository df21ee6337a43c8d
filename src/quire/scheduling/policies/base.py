"""Defaults of all policies: no displacement, requests that fit may pass, the engine's step target holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any

from quire.types.config import SchedulerOptions
from quire.types.policy import EventKind, PolicyEvent, SequenceId, SequenceView


class Policy(ABC):
    """Base of `types.policy.SchedulingPolicy` implementations; subclasses say how sequences are ordered."""

    observes: Collection[EventKind] = ()
    uses_priority = False  # whether a request's priority has a meaning; where it has none, setting it is an error
    contiguous = False  # whether KV memory is reserved whole and in one piece: the allocator's affair

    def __init__(self, options: SchedulerOptions):
        self.options = options

    @abstractmethod
    def key(self, seq: SequenceView) -> tuple[Any, ...]: ...

    def displaces(self, waiting: SequenceView, running: SequenceView) -> bool:
        return False

    def passes(self, blocked: SequenceView, behind: SequenceView) -> bool:
        return True

    def latency_target(self, running: Collection[SequenceView]) -> float | None:
        return None

    def observe(self, event: PolicyEvent) -> Iterable[SequenceId]:
        return ()
