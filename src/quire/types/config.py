"""Options, each declared once with its help text; flags, keyword arguments and docs derive from these fields.

Raw options are what the user said (None: not said). `resolve` in the rooms that know the hardware turns them
into facts and says why; nothing here looks at the machine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from quire.types.errors import ConfigError


def option(default: Any, help: str, **extra: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True)
class ModelOptions:
    """What to load."""

    model: str = option("smollm2-135m", "model name, hub id, directory or GGUF file", positional=True)
    dtype: str = option("auto", "weights and activations: auto, float32, float16, bfloat16 or fp8 (GPU)")
    max_model_len: int | None = option(
        None, "longest request to serve (default: what the model was trained for; beyond that with kv_budget)"
    )
    random_weights: bool = option(False, "ignore weight files and draw random weights from the config")


@dataclass(frozen=True)
class DeviceOptions:
    """Where to run."""

    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    threads: int | None = option(None, "CPU threads for compute (default: physical cores)")
    depth: int | None = option(None, "steps in flight (default: 2 on a GPU, 1 on a CPU)")
    graphs: bool = option(True, "on a GPU, capture steps as CUDA graphs at start")
    invariant: bool = option(False, "give a request the same bits whatever runs beside it (on a GPU: slower)")


@dataclass(frozen=True)
class CacheOptions:
    """KV memory."""

    page_size: int = option(16, "tokens per KV page")
    kv_pages: int | None = option(None, "number of KV pages (default: from --kv-memory)")
    kv_dtype: str = option(
        "auto",
        "KV pages: auto (8 bits with --dtype fp8, else as the model computes), int8, int8-kivi (keys scaled by "
        "channel too), fp8 or int4 (an experiment)",
    )
    kv_memory: str | None = option(None, "bytes for KV pages, such as 512M or 8G (default: by device)")
    prefix_cache: bool = option(True, "share KV pages between requests with equal prefixes")
    kv_host: str | None = option(None, "host memory for KV pages that leave the device, such as 4G (pinned on a GPU)")
    kv_disk: str | None = option(None, "directory of KV pages that outlive the engine: DIR or DIR:SIZE, such as kv:50G")
    kv_remote: str | None = option(
        None, "Redis or Valkey server through which engines share pages: redis://host:port/0"
    )
    kv_policy: str = option("lru", "which page leaves a full tier: lru, lfu or cost (recompute seconds saved per byte)")
    session_quota: float = option(0.25, "part of the device's KV pages that one tenant's paused sessions may hold")
    kv_fsync: bool = option(False, "have the disk tier survive power loss too, not only a crash (slower writes)")


@dataclass(frozen=True)
class SchedulerOptions:
    """Who runs next."""

    scheduler: str = option("fcfs", "fcfs, priority, static, or package.module:Class of your own")
    max_batch_tokens: int | None = option(None, "prompt tokens per step (default: 512 on a CPU, 8192 on a GPU)")
    max_seqs: int | None = option(None, "sequences running at once (default: 64 on a CPU, 1024 on a GPU)")
    prefill_chunk: int | None = option(None, "most tokens of one request per step (default: the whole step)")
    step_target: float | None = option(
        None, "seconds a step may last while answers stream: prompts are cut to fit (default: 0.3 on a GPU; 0: any)"
    )
    max_waiting: int = option(4096, "requests allowed to queue before new ones are refused")
    preempt: str = option("auto", "when pages run out: recompute, swap (to --kv-host) or auto (whichever is quicker)")
    ageing: float = option(10.0, "priority policy: seconds of waiting worth one priority level")


@dataclass(frozen=True)
class SpeculationOptions:
    """Speculative decoding."""

    speculation: str = option(
        "off", "the drafter: off, ngram, suffix, draft:MODEL, medusa:PATH, eagle:PATH (see docs/speculation.md)"
    )
    draft_tokens: int | None = option(None, "longest draft, in tokens (default: by drafter)")
    draft_adapt: bool = option(True, "draft less, or nothing, where drafts have not paid lately")


@dataclass(frozen=True)
class EngineOptions:
    """Everything one engine is told; a flat view over the concerns above."""

    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    device: DeviceOptions = dataclasses.field(default_factory=DeviceOptions)
    cache: CacheOptions = dataclasses.field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = dataclasses.field(default_factory=SchedulerOptions)
    speculation: SpeculationOptions = dataclasses.field(default_factory=SpeculationOptions)

    @classmethod
    def of(cls, **flat: Any) -> EngineOptions:
        """From flat names, as on the command line: `EngineOptions.of(model="m", page_size=32)`."""
        parts: dict[str, Any] = {}
        for concern in dataclasses.fields(cls):
            kind = concern.default_factory
            assert isinstance(kind, type)
            names = {f.name for f in dataclasses.fields(kind)}
            parts[concern.name] = kind(**{name: flat.pop(name) for name in list(flat) if name in names})
        if flat:
            known = ", ".join(sorted(f.name for f in flat_fields()))
            raise ConfigError(f"unknown option {min(flat)!r}; known options: {known}")
        return cls(**parts)

    def flat(self) -> dict[str, Any]:
        """The options that differ from their defaults, by flat name (plain values, fit for JSON)."""
        return {
            f.name: getattr(part, f.name)
            for part in (self.model, self.device, self.cache, self.scheduler, self.speculation)
            for f in dataclasses.fields(part)
            if getattr(part, f.name) != f.default
        }


CONCERNS = (ModelOptions, DeviceOptions, CacheOptions, SchedulerOptions, SpeculationOptions)


def flat_fields() -> list[dataclasses.Field[Any]]:
    """All option fields, in order."""
    return [f for kind in CONCERNS for f in dataclasses.fields(kind)]


_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """'512M' or '8GiB' → bytes."""
    stripped = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = stripped[-1:] if stripped[-1:].isalpha() else ""
    try:
        value = float(stripped.removesuffix(unit))
        size = int(value * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(f"cannot read {text!r} as a size; write it like 512M or 8G") from None
    if size <= 0:
        raise ConfigError(f"size must be positive, got {text!r}")
    return size
