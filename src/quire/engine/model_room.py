"""Which models of a pool fit beside each other, and which are to go where another does not.

Refuses to know: how a model goes, who waits for that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from quire.engine.model_eviction import Candidate, GreedyDual, victims
from quire.engine.pooled_model import PooledModel
from quire.types.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True)
class PoolLimits:
    """What may be loaded at once, how long a request waits for room, and what may sleep beside those loaded."""

    models: int | None = None
    bytes: int | None = None
    wait: float = 60.0
    asleep: int = 0  # bytes of host memory; 0: engines end instead


class ModelRoom:
    def __init__(self, models: Collection[PooledModel], limits: PoolLimits):
        self._models = models
        self._limits = limits
        self._policy = GreedyDual()
        self._check_pinned()

    def _check_pinned(self) -> None:
        kept = [model for model in self._models if model.spec.pinned]
        most, size = self._limits.models, self._limits.bytes
        others = len(kept) < len(self._models)
        if most is not None and len(kept) + others > most:
            raise ConfigError(f"max_loaded_models {most} leaves no room for others beside {len(kept)} that are pinned")
        for model in self._models:
            if size is not None and model.size > size:
                raise ConfigError(f"{model.name} takes {gib(model.size)}, more than models_memory {gib(size)}")

    def used(self, model: PooledModel) -> None:
        size = max(model.size, 1) / GIB if self._limits.bytes is not None else 1.0
        self._policy.used(model.name, model.load_s, size)

    def evicted(self, model: PooledModel) -> None:
        """It goes because others need its room."""
        self._policy.evicted(model.name)

    def others(self, model: PooledModel) -> Iterable[PooledModel]:
        return (other for other in self._models if other is not model)

    def fits(self, model: PooledModel) -> bool:
        """Beside all that are in memory now."""
        return max(self._lacking(model, [other for other in self.others(model) if other.in_memory])) <= 0

    def going_for(self, model: PooledModel) -> set[PooledModel] | None:
        """Those that are to go for it, beside those that are unloaded already; None: all that may are too few."""
        beside = [other for other in self.others(model) if other.in_memory and not other.unloading]
        return self._chosen(self._candidates(model), *self._lacking(model, beside))

    def idle_for(self, model: PooledModel) -> set[PooledModel]:
        """Idle ones that are to go for it, where it turned out larger than expected."""
        models, size = self._lacking(model, [other for other in self.others(model) if other.resident is not None])
        if models <= 0 and size <= 0:
            return set()
        idle = [one for one in self._candidates(model) if one.idle]
        chosen = self._chosen(idle, models, size)
        return chosen if chosen is not None else self._named({one.name for one in idle})

    def _chosen(self, candidates: Iterable[Candidate], models: int, size: int) -> set[PooledModel] | None:
        chosen = victims(self._policy.in_order(candidates), models, size)
        return None if chosen is None else self._named({one.name for one in chosen})

    def _named(self, names: set[str]) -> set[PooledModel]:
        return {model for model in self._models if model.name in names}

    def _lacking(self, model: PooledModel, beside: list[PooledModel]) -> tuple[int, int]:
        """Models and bytes that are too many with this one loaded beside others."""
        models, size = self._limits.models, self._limits.bytes
        over = len(beside) + 1 - models if models is not None else 0
        if size is None:
            return over, 0
        return over, sum(other.size for other in beside) + min(model.size, size) - size  # alone, each may be loaded

    def _candidates(self, model: PooledModel) -> Iterable[Candidate]:
        for other in self.others(model):
            if other.resident is not None and not other.spec.pinned:
                yield Candidate(other.name, other.size, not other.resident.leases, other.resident.draining)


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
