"""Options, each declared once with its help text; flags, keyword arguments and docs derive from these fields.

Each says what it takes, and is checked when it is given, whoever gives it. Raw options are what the user said (None:
not said). `resolve` in the rooms that know the hardware turns them into facts and says why; nothing here looks at the
machine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from quire.types.errors import ConfigError
from quire.types.option_checks import Checked, Pair, option
from quire.types.option_names import unknown_option


@dataclass(frozen=True)
class ModelOptions(Checked):
    """What to load."""

    model: str = option("smollm2-135m", "model name, hub id, directory or GGUF file", positional=True)
    dtype: str = option(
        "auto",
        "weights and activations: auto, float32, float16, bfloat16 or fp8 (GPU)",
        forms=("auto", "float32", "float16", "bfloat16", "fp8"),
        common=True,
    )
    quantize: str = option(
        "auto",
        "plain weights on load: auto (int8 where the compiled CPU decoder runs them, else none), none, int8 (CPU), "
        "int4, fp8 (GPU)",
        forms=("auto", "none", "int8", "int4", "fp8"),
        common=True,
    )
    max_model_len: int | None = option(
        None,
        "longest request to serve (default: what the model was trained for; beyond that with kv_budget)",
        low=2,
        common=True,
    )
    random_weights: bool = option(False, "ignore weight files and draw random weights from the config")


@dataclass(frozen=True)
class DeviceOptions(Checked):
    """Where to run."""

    device: str = option("auto", "auto, cpu, cuda or cuda:N", forms=("auto", "cpu", "cuda", "cuda:N"), common=True)
    threads: int | None = option(
        None, "CPU threads for compute (default: all cores that this process may use)", low=1, high=1024, common=True
    )
    depth: int | None = option(None, "steps in flight (default: 2 on a GPU, 1 on a CPU)", low=1, high=1024)
    tensor_parallel: int = option(
        1,
        "processes that share every layer, each with some of the heads, a part of the MLPs and of the vocabulary: one "
        "for each GPU, or on the cores of this machine",
        low=1,
        high=1024,
        alias="--tensor-parallel-size",
    )
    pipeline_parallel: int = option(
        1,
        "processes that have some of the layers each, one behind the other: one for each GPU, or on the cores of this "
        "machine",
        low=1,
        high=1024,
        alias="--pipeline-parallel-size",
    )
    context_parallel: int = option(
        1,
        "processes that divide the tokens of every context, each with all weights (with tensor_parallel, its part of "
        "them) and a part of the KV cache: one for each GPU, or on the cores of this machine",
        low=1,
        high=1024,
    )
    expert_parallel: bool = option(
        False,
        "with tensor_parallel: each process has some of the experts, whole, instead of a part of every one",
        alias="--enable-expert-parallel",
    )
    graphs: bool = option(True, "on a GPU, capture steps as CUDA graphs at start")
    invariant: bool = option(False, "give a request the same bits whatever runs beside it (on a GPU: slower)")

    @property
    def ranks(self) -> int:
        """Processes that a model is divided between."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel


@dataclass(frozen=True)
class CacheOptions(Checked):
    """KV memory."""

    page_size: int = option(16, "tokens per KV page", low=1, high=1024)
    kv_pages: int | None = option(None, "number of KV pages (default: from --kv-memory)", low=1)
    kv_dtype: str = option(
        "auto",
        "KV pages: auto (8 bits with --dtype fp8, else as the model computes), int8, int8-kivi (keys scaled by "
        "channel too), fp8, int4 (an experiment), kivi4 or kivi2 (on a CPU: KIVI at 4 or 2 bits)",
        forms=("auto", "int8", "int8-kivi", "fp8", "int4", "kivi4", "kivi2"),
        common=True,
    )
    kv_memory: str | None = option(
        None, "bytes for KV pages, such as 512M or 8G (default: by device)", size=True, common=True
    )
    kv_snapshots: int | None = option(
        None,
        "snapshots of recurrent layers' states kept for prefix hits (default: as many as half of KV memory holds)",
        low=0,
    )
    snapshot_tokens: int = option(1024, "tokens of a prompt between one snapshot of its state and the next", low=1)
    prefix_cache: bool = option(True, "share KV pages between requests with equal prefixes", common=True)
    kv_host: str | None = option(
        None, "host memory for KV pages that leave the device, such as 4G (pinned on a GPU)", size=True
    )
    kv_disk: str | None = option(
        None, "directory of KV pages that outlive the engine: DIR or DIR:SIZE, such as kv:50G", sized=True
    )
    kv_remote: str | None = option(
        None,
        "Redis or Valkey server through which engines share pages: redis://host:port/0",
        forms=("redis://ADDRESS", "rediss://ADDRESS", "unix://PATH"),
    )
    kv_policy: str = option(
        "lru",
        "which page leaves a full tier: lru, lfu or cost (recompute seconds saved per byte)",
        forms=("lru", "lfu", "cost"),
    )
    session_quota: float = option(
        0.25, "part of the device's KV pages that one tenant's paused sessions may hold", low=0, high=1
    )
    sparse_attention: str = option(
        "quest",
        "how decoding chooses pages where it reads only some: quest (by upper bounds of scores) or blocks (the first, "
        "the last half, and evenly between)",
        forms=("quest", "blocks"),
    )
    sparse_pages: int = option(
        0, "KV pages that decoding reads of each KV head, for requests that do not say; 0: all (on CPUs)", low=0
    )
    kv_events: str | None = option(
        None,
        "ZMQ endpoint at which KV cache events are published in vLLM's format, for routers: tcp://127.0.0.1:5557",
        forms=("tcp://ADDRESS", "ipc://PATH"),
    )
    kv_events_replay: str | None = option(
        None,
        "ZMQ endpoint at which those who missed events get them again: tcp://127.0.0.1:5558",
        forms=("tcp://ADDRESS", "ipc://PATH"),
    )
    kv_events_topic: str = option("kv-events", "topic of published KV cache events")
    kv_fsync: bool = option(False, "have the disk tier survive power loss too, not only a crash (slower writes)")


@dataclass(frozen=True)
class SchedulerOptions(Checked):
    """Who runs next."""

    scheduler: str = option(
        "auto",
        "fcfs, priority, sjf, srpt, mlfq, lpm, slo, fair, auto, static, or package.module:Class of your own "
        "(see docs/scheduling.md)",
        forms=("fcfs", "priority", "sjf", "srpt", "mlfq", "lpm", "slo", "fair", "auto", "static", "MODULE:CLASS"),
        common=True,
    )
    max_batch_tokens: int | None = option(None, "prompt tokens per step (default: 512 on a CPU, 8192 on a GPU)", low=1)
    max_seqs: int | None = option(
        None, "sequences running at once (default: 64 on a CPU, 1024 on a GPU)", low=1, common=True
    )
    prefill_chunk: int | None = option(None, "most tokens of one request per step (default: the whole step)", low=1)
    step_target: float | None = option(
        None,
        "seconds a step may last while answers stream: prompts are cut to fit (default: 0.3; 0: any)",
        low=0,
    )
    max_waiting: int = option(4096, "requests allowed to queue before new ones are refused", low=1)
    preempt: str = option(
        "auto",
        "when pages run out: recompute, swap (to --kv-host) or auto (whichever is quicker)",
        forms=("auto", "recompute", "swap"),
    )
    slo_ttft: float | None = option(
        None, "target for the time to first token, in seconds, where a request or its key has none", above=0
    )
    slo_tpot: float | None = option(
        None, "target for the time per output token, in seconds, where a request or its key has none", above=0
    )
    slo_give_up: bool = option(
        False, "slo and auto: end a waiting request with an error once its first token can only come too late"
    )
    max_wait: float = option(
        60.0,
        "seconds of waiting after which a request goes before all others, one in eight of those admitted "
        "(policies that could starve it)",
        above=0,
    )
    length_predictor: str = option(
        "mlp",
        "sjf, srpt and auto: how long answers are expected to become: mlp (learned from those that ended) or constant",
        forms=("mlp", "constant"),
    )
    ageing: float = option(10.0, "priority policy: seconds of waiting worth one priority level", above=0)


@dataclass(frozen=True)
class SpeculationOptions(Checked):
    """Speculative decoding."""

    speculation: str = option(
        "off",
        "the drafter: off, ngram, suffix, draft:MODEL, medusa:PATH, eagle:PATH, mtp (see docs/speculation.md)",
        forms=("off", "ngram", "suffix", "draft:MODEL", "medusa:PATH", "eagle:PATH", "mtp", "synthetic:RATE"),
        common=True,
    )
    draft_tokens: int | None = option(None, "longest draft, in tokens (default: by drafter)", low=1, high=16)
    draft_adapt: bool = option(True, "draft less, or nothing, where drafts have not paid lately")


@dataclass(frozen=True)
class LoraOptions(Checked):
    """LoRA adapters."""

    lora: tuple[str, ...] = option(
        (),
        "adapter to load at start, NAME=PATH of a PEFT checkpoint's directory; may be said several times",
        forms=("NAME=PATH",),
        alias="--lora-modules",
        common=True,
    )
    max_loras: int | None = option(
        None, "adapters that may be loaded at once (default: those named by lora)", low=1, high=4096
    )
    max_lora_rank: int | None = option(
        None, "largest rank of an adapter (default: the largest of those named by lora, at least 16)", low=1, high=1024
    )

    @property
    def named(self) -> dict[str, str]:
        """Paths by name."""
        found: dict[str, str] = {}
        for name, _, path in (entry.partition("=") for entry in self.lora):
            if name in found:
                raise ConfigError(f"lora names two adapters {name!r}")
            found[name] = path
        return found

    @property
    def slots(self) -> int:
        """Adapters there is room for."""
        if self.max_loras is not None and self.max_loras < len(self.lora):
            raise ConfigError(f"lora names {len(self.lora)} adapters, max_loras allows {self.max_loras}")
        return self.max_loras or len(self.lora)


_TIERS = ("kv_host", "kv_disk", "kv_remote")
_SHARED = "tiers hold shared prefixes"
_PARALLEL = ("tensor_parallel", "pipeline_parallel", "context_parallel")
_COMPILED = "the compiled decoder runs in one process"
_DIVIDED = "ranks have a part of each page"
_RESIDUAL = "the latest tokens lie in pages of another kind, and pages are read in order"
_CONTIGUOUS = "static batching reserves contiguous memory, and has no pages to share or to move"

PAIRS = (
    Pair("kv_pages", "both say how large the pool is", excludes="kv_memory"),
    *(Pair(name, "no events are published", needs=("kv_events",)) for name in ("kv_events_replay", "kv_events_topic")),
    Pair("kv_events", "they tell of shared prefixes", excludes="prefix_cache", excluded=False),
    Pair("kv_events", _CONTIGUOUS, excludes="scheduler", excluded="static"),
    Pair("kv_fsync", "it is how the disk tier writes", needs=("kv_disk",)),
    Pair("kv_policy", "it says which page leaves a full tier", needs=("kv_host", "kv_disk")),
    Pair("preempt", "pages are moved to a tier below the device", value="swap", needs=_TIERS),
    Pair("slo_give_up", "it has no targets to miss", excludes="scheduler", excluded="fcfs"),
    Pair("length_predictor", "it looks at no lengths", excludes="scheduler", excluded="fcfs"),
    *(
        Pair("max_wait", "it lets nobody starve", excludes="scheduler", excluded=policy)
        for policy in ("fcfs", "priority", "fair", "static")
    ),
    Pair("ageing", "only the priority policy ages", needs=("scheduler",), excludes="scheduler", excluded="static"),
    *(Pair(tier, _SHARED, excludes="prefix_cache", excluded=False) for tier in _TIERS),
    *(Pair(n, _CONTIGUOUS, excludes="scheduler", excluded="static") for n in (*_TIERS, "session_quota")),
    Pair("session_quota", "sessions hold shared prefixes", excludes="prefix_cache", excluded=False),
    Pair("draft_tokens", "nothing is drafted", needs=("speculation",)),
    Pair("draft_adapt", "nothing is drafted", needs=("speculation",)),
    Pair("max_lora_rank", "no adapter can be loaded", needs=("lora", "max_loras")),
    *(Pair("sparse_pages", _RESIDUAL, excludes="kv_dtype", excluded=kind) for kind in ("kivi4", "kivi2")),
    Pair("pipeline_parallel", "a model is divided in one way or the other", excludes="tensor_parallel"),
    Pair("context_parallel", "ranks have all layers", excludes="pipeline_parallel"),
    *(Pair("kv_dtype", _RESIDUAL, value=kind, excludes="context_parallel") for kind in ("kivi4", "kivi2")),
    *(Pair(name, _DIVIDED, excludes="context_parallel") for name in ("sparse_pages", "sparse_attention")),
    *(Pair(tier, _DIVIDED, excludes=how) for tier in _TIERS for how in _PARALLEL),
    *(Pair(name, "adapters are not divided", excludes=how) for name in ("lora", "max_loras") for how in _PARALLEL),
    *(Pair("invariant", "ranks have kernels of their own", excludes=how) for how in _PARALLEL[1:]),
    *(Pair("kv_dtype", "keys are scaled on one rank", value="int8-kivi", excludes=how) for how in _PARALLEL),
    *(Pair("quantize", _COMPILED, value="int8", excludes=how) for how in _PARALLEL),
    *(Pair("quantize", "4 bits are not divided", value="int4", excludes=how) for how in _PARALLEL),
    Pair("expert_parallel", "there are no ranks to divide experts", needs=("tensor_parallel",)),
    Pair("invariant", "ranks add up in an order of their own", excludes="tensor_parallel"),
    Pair("lora", "keys are scaled by channel as the base has them", excludes="kv_dtype", excluded="int8-kivi"),
    Pair("max_loras", "keys are scaled by channel as the base has them", excludes="kv_dtype", excluded="int8-kivi"),
)


@dataclass(frozen=True)
class EngineOptions:
    """Everything one engine is told; a flat view over the concerns above."""

    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    device: DeviceOptions = dataclasses.field(default_factory=DeviceOptions)
    cache: CacheOptions = dataclasses.field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = dataclasses.field(default_factory=SchedulerOptions)
    speculation: SpeculationOptions = dataclasses.field(default_factory=SpeculationOptions)
    adapters: LoraOptions = dataclasses.field(default_factory=LoraOptions)

    def __post_init__(self) -> None:
        said = self.flat()
        for pair in PAIRS:
            if problem := pair.problem(said):
                raise ConfigError(problem)

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
            raise ConfigError(unknown_option(min(flat), [f.name for f in flat_fields()]))
        return cls(**parts)

    def but(self, **flat: Any) -> EngineOptions:
        """These options, some of them replaced; of the others, those that have no effect any more are left out."""
        unsaid = {field.name: field.default for field in flat_fields()}
        said = {name: value for name, value in (self.flat() | flat).items() if value != unsaid.get(name, ...)}
        for pair in PAIRS:
            if pair.problem(said):
                said.pop(pair.excludes if pair.option in flat else pair.option, None)
        return EngineOptions.of(**said)

    def flat(self) -> dict[str, Any]:
        """The options that differ from their defaults, by flat name (plain values, fit for JSON)."""
        return {
            f.name: getattr(part, f.name)
            for part in (self.model, self.device, self.cache, self.scheduler, self.speculation, self.adapters)
            for f in dataclasses.fields(part)
            if getattr(part, f.name) != f.default
        }


CONCERNS = (ModelOptions, DeviceOptions, CacheOptions, SchedulerOptions, SpeculationOptions, LoraOptions)


def flat_fields() -> list[dataclasses.Field[Any]]:
    """All option fields, in order."""
    return [f for kind in CONCERNS for f in dataclasses.fields(kind)]
