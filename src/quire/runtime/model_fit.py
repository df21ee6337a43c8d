"""Whether a model runs on this machine, from its headers alone: what its weights take, how many tokens of KV fit beside
them, about how fast one request would decode, and what else would fit where it does not.

Refuses to know: where headers came from, how anything is shown.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import torch

from quire.assets.hub_headers import HeadersOnlyError
from quire.kernels import cpu
from quire.model import (
    CompiledModel,
    DecoderSpec,
    compiled_refusal,
    packed_weights,
    parameter_count,
    read_spec,
    resident_bytes,
    weight_bytes,
)
from quire.model.blocks.context_stages import CONTEXT_ATTENTION, ContextStages
from quire.model.blocks.fused import choose_stages
from quire.model.compiled import refusal
from quire.model.decoder import Model
from quire.model.decoder_spec import Experts
from quire.model.families.registry import read_family
from quire.model.loading.keep_quantised import can_keep
from quire.model.parallel import check_parallel, describe_parallel
from quire.model.quantization.dense_scheme import DenseScheme
from quire.model.quantization.fp8 import Fp8Scheme
from quire.runtime.capacity import GIB, kv_capacity, kv_layout, working_memory
from quire.runtime.hardware import DTYPES, Hardware, Resolved, probe, resolve
from quire.runtime.product_search import known_products, matrices
from quire.runtime.rank_options import check_ranks
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError, ModelFileError
from quire.types.kv import KVLayout
from quire.types.seams import WeightSource

# Of the bandwidth that reading memory in order has, about what the decode steps of one sequence reach; the rest goes
# into attention, norms, sampling and the host. On a Neoverse N1 it is 0.73 of a 0.6B model in 8 bits, 0.55 in 4 bits,
# and 0.43 of a 135M model in 4 bits.
DECODE_EFFICIENCY = {"cpu": 0.6, "cuda": 0.8}
FOUR_BIT_SHARE = 0.4  # of the bytes that bf16 takes: checkpoints below it are in 4 bits, those above in 8
PROBE_BYTES = 256 << 20
SMALLER = (("dtype", "bfloat16"), ("quantize", "int8"), ("quantize", "fp8"), ("quantize", "int4"))


@dataclass(frozen=True)
class ModelFit:
    spec: DecoderSpec
    hardware: Hardware
    decisions: Resolved
    parameters: int
    weights: int  # bytes resident
    form: str  # what the weights are kept as
    kernels: tuple[str, ...]
    layout: KVLayout
    pages: int  # the null page among them
    why: str  # so many pages
    tokens: int  # of KV that fit
    context: int  # longest request
    ranks: int  # processes that divide the model; `pages` and `layout` are those of the first
    kv_bytes: int  # of the KV pages of all ranks

    @property
    def fits(self) -> bool:
        return self.pages > 1 and self.tokens > 1

    def sequences(self, context: int) -> int:
        """Of so many tokens, that fit at once."""
        return max(0, self.pages - 1) // self.layout.pages_for(context)

    @property
    def tokens_per_second(self) -> float:
        """Of one request, decoding: the weights that a token needs, read at the speed of memory."""
        device = torch.device(self.hardware.device)
        speed = memory_bandwidth(self.hardware.device) * DECODE_EFFICIENCY[device.type]
        return speed / max(1.0, self.weights * active_share(self.spec, self.parameters))


def model_fit(source: WeightSource, options: EngineOptions, hardware: Hardware | None = None) -> ModelFit:
    """Raises what loading it would raise, if no more than headers are needed to know: ModelFileError where the model
    is not supported, ConfigError where options do not go with it."""
    hardware = hardware or probe(options.device.device)
    decisions = resolve(options, hardware)
    spec = read_spec(source)
    weights, form, kernels, own, kinds = _weights(source, spec, options, decisions)
    ranks, part = options.device.ranks, spec
    if ranks > 1:
        part = check_ranks(spec, options, hardware)
        backend, itemsize = "NCCL" if hardware.gpu else "gloo", DTYPES[decisions.dtype].itemsize
        kernels.append(describe_parallel(spec, options.device, itemsize, backend))
        copies = options.device.context_parallel  # on CPUs ranks share one memory
        weights = weights * copies // ranks if hardware.gpu else weights * copies
    layout = kv_layout(options, decisions, part, own, kinds)
    working = working_memory(options, decisions, spec, layout, hardware.memory - weights)
    pages, why = kv_capacity(options, hardware, layout, slots=decisions.max_seqs, working=working, taken=weights)
    pages = pages if weights < hardware.memory else 0
    tokens = max(0, pages - 1) * options.cache.page_size * layout.ranks // len(layout.groups)
    parts = [spec] if ranks == 1 else [check_parallel(spec, options.device, rank) for rank in range(ranks)]
    page_bytes = sum(kv_layout(options, decisions, one, own, kinds).page_bytes for one in parts)
    context = min(options.model.max_model_len or spec.max_position, spec.max_position)
    if not spec.encoder:
        context = min(context, tokens)
    return ModelFit(
        spec, hardware, decisions, parameter_count(spec), weights, form, tuple(kernels), layout, pages, why, tokens,
        context, ranks, pages * page_bytes,
    )  # fmt: skip


def _weights(
    source: WeightSource, spec: DecoderSpec, options: EngineOptions, decisions: Resolved
) -> tuple[int, str, list[str], str, tuple[str, ...]]:
    """Bytes of the weights, what they are kept as, what runs them, and which KV it prefers and knows."""
    device, dtype = torch.device(decisions.device), DTYPES[decisions.dtype]
    stored = sum(info.nbytes for info in source.tensors().values())
    kept = "weights stay quantised"
    try:
        refused = (
            "it runs in one process"
            if options.device.ranks > 1
            else "dtype was chosen"
            if options.model.dtype != "auto"
            else compiled_refusal(
                source, device, random_weights=options.model.random_weights, quantize=decisions.quantize
            )
        )
        if refused is None:
            weights, kept = packed_weights(source, decisions.quantize)
        else:
            scheme = Fp8Scheme() if decisions.fp8 else None
            weights = resident_bytes(source, device, dtype, decisions.quantize, scheme)
    except HeadersOnlyError:  # a published format, some of whose small tensors say what the others are
        refused = refusal(spec, device)
        four_bits = stored < FOUR_BIT_SHARE * weight_bytes(spec, torch.bfloat16)
        stays = refused is None or (four_bits and can_keep(device, dtype))
        weights = stored if stays else weight_bytes(spec, dtype)
    if refused is None:
        kernels = [f"decoder: compiled ({', '.join(cpu.features())}), {kept}"]
        form: str = decisions.quantize if decisions.quantize in ("int4", "int8") else "as stored"
        if form == "as stored" and "stay" not in kept:
            form = "int8"
        return weights, form, kernels, CompiledModel.kv_dtype, tuple(CompiledModel.kv_kinds)
    if decisions.quantize == "int8" or (decisions.quantize == "int4" and device.type == "cpu"):
        raise ConfigError(f"quantize {decisions.quantize} is for the compiled CPU decoder: {refused}")
    if options.device.context_parallel > 1:
        described, kinds = [CONTEXT_ATTENTION], ContextStages.kv_kinds
    else:
        stages = choose_stages(spec, device)
        multiplied = Fp8Scheme() if decisions.fp8 else DenseScheme()
        described, kinds = stages.describe(multiplied), stages.kv_kinds
        if device.type == "cuda" and options.device.ranks == 1 and not options.device.invariant:
            model = Model(spec, device=torch.device("meta"), dtype=dtype, scheme=multiplied)
            described += known_products(device).describe(matrices(model))
    kernels = [f"decoder: not the compiled one, {refused}", *described]
    form = "fp8" if decisions.fp8 else "int4" if decisions.quantize == "int4" else decisions.dtype
    return weights, form, kernels, decisions.dtype, (decisions.dtype, *kinds)


def other_forms(source: WeightSource) -> str:
    """What would load of a model whose weights are stored in a way that is not read here; nothing if its architecture
    is not supported either."""
    try:
        family, _ = read_family(source)
    except ModelFileError:
        return ""
    return "a GGUF Q4_K_M or a plain safetensors copy of it loads" if family.gguf_names else "a safetensors copy loads"


def misfit(source: WeightSource, options: EngineOptions, fit: ModelFit) -> str:
    """Why a model does not fit here, and what would."""
    name = f"{fit.weights / GIB:.1f} GiB of weights in {fit.form}, {fit.hardware.memory / GIB:.1f} GiB of memory free"
    if fit.weights < fit.hardware.memory:
        return f"it does not fit: {name}, too little of it left for KV pages; raise kv_memory"
    would = [
        f"{said} would ({other.weights / GIB:.1f} GiB, context {other.context:,}, "
        f"about {other.tokens_per_second:.2g} tok/s)"
        for said, other in smaller_forms(source, options, fit).items()
    ]
    if any(said.startswith("quantize int4") for said in would):
        would.append("so would a 4-bit GGUF of it, with less to fetch")
    return f"it does not fit: {name}; {'; '.join(would) or 'a smaller model would'}"


def smaller_forms(source: WeightSource, options: EngineOptions, fit: ModelFit) -> dict[str, ModelFit]:
    """Options under which a model that does not fit would: `quantize int4` and the like, the largest first."""
    found: dict[str, ModelFit] = {}
    for name, value in SMALLER:
        try:
            other = model_fit(source, options.but(**{"dtype": "auto", "quantize": "auto", name: value}), fit.hardware)
        except ConfigError:
            continue  # not on this device, or not this model
        if other.fits and other.weights < fit.weights:
            found[f"{name} {value}"] = other
    return found


def active_share(spec: DecoderSpec, parameters: int) -> float:
    """The part of the weights that a decode step of one sequence reads: not the experts that are not chosen, nor the
    embedding, of which it takes a row."""
    idle = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden
    for layer in spec.layers:
        feed = layer.feed
        if isinstance(feed, Experts):
            idle += (feed.count - feed.top_k) * feed.intermediate * spec.hidden * (3 if feed.gated else 2)
    return max(0.0, 1 - idle / max(1, parameters))


@cache
def memory_bandwidth(device: str) -> float:
    """Bytes a second that a large array is read with, measured: a tenth of a second on a CPU."""
    numbers = torch.ones(PROBE_BYTES // 4, device=device)
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        float(numbers.sum())
        best = min(best, time.perf_counter() - began)
    return PROBE_BYTES / best
