"""From a weight source (or from nothing) to a model in memory.

Names and shapes are all checked before the first byte is read; then tensors go one by one to where they stay,
so beside the model itself only a slice of one tensor is ever in memory. Refuses to know: file formats, devices'
capacities.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from quire.kernels import cpu
from quire.kernels.reference.dequant import FLOATS
from quire.model.blocks.linear import Linear, Module, Plain
from quire.model.compiled import CompiledModel, refusal
from quire.model.context_parallel import context_spec
from quire.model.decoder import Model
from quire.model.decoder_spec import DecoderSpec, SparseAttention
from quire.model.families.architecture import IGNORED, OTHER_MODALITY, Architecture, Target
from quire.model.families.registry import read_family
from quire.model.loading.expert_tensors import ExpertTensors
from quire.model.loading.formats.published_source import unquantised
from quire.model.loading.gguf_config import is_gguf
from quire.model.loading.gguf_tensors import GgufTensors
from quire.model.loading.held_model import WeightMemory, hold_model, map_model
from quire.model.loading.keep_quantised import can_keep, four_bit_modules, keep_four_bits
from quire.model.loading.packed_weights import (
    PACKED_LATER,
    Packed,
    PackedPlace,
    is_packed,
    matrices_bytes,
    pack_weights,
    packed_matrices,
)
from quire.model.loading.stored_tensor import SLICE, StoredTensor
from quire.model.pipeline import own_module, stage_shards, staged_spec
from quire.model.quantization.scheme import QuantScheme
from quire.model.ranks import Ranks
from quire.model.runnable import Runnable
from quire.model.sharding import Shard, sharded_spec, shards
from quire.types.errors import ConfigError, ModelFileError
from quire.types.seams import WeightSource

log = logging.getLogger("quire.model")

Quantize = Literal["auto", "none", "int8", "int4"]
Progress = Callable[[int, int], None]  # bytes done, bytes in all
Place = tuple[str, str, int]  # module, kind, part


def load_model(
    source: WeightSource,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    random_weights: bool = False,
    seed: int = 0,
    length: int | None = None,
    compiled: int | None = None,
    quantize: Quantize = "auto",
    scheme: QuantScheme | None = None,
    invariant: bool = False,
    sparse: SparseAttention | None = None,
    ranks: Ranks | None = None,
    held: WeightMemory | None = None,
    progress: Progress | None = None,
) -> Runnable:
    """The model that `source` holds; with `random_weights`, one of the same shape drawn from `seed`.

    `length`: the longest context to be served, if it is beyond what the model was trained for. `compiled`: threads
    for the compiled decoder, which is then taken wherever it can run; `dtype` does not concern it. `quantize`: to how
    many bits it packs plain matrices, 8 if not said; with "none" it leaves them to torch; "int4" is for GPUs too, where
    matrices that are stored in 4 bits stay so. `scheme`: how the layers' others are kept; dense in `dtype` if not said.
    `invariant`: a row's bits may not depend on its batch (the compiled decoder's never do). `sparse`: how queries
    choose pages, where they do. `ranks`: with which it is divided; a rank's part is loaded. `held`: where weights are
    found, or left for the next who loads them.
    """
    family, spec = read_family(source)
    spec = spec if sparse is None else spec.sparsified(sparse)
    why_not = None
    if compiled is not None and ranks is not None:
        why_not = "it runs in one process"
    elif compiled is not None:
        why_not = compiled_refusal(source, torch.device(device), random_weights=random_weights, quantize=quantize)
        if why_not is None:
            return load_compiled(
                source, threads=compiled, quantize=quantize, length=length, sparse=sparse, held=held, progress=progress
            )
    packs = can_keep(torch.device(device), dtype) and scheme is None and not invariant and ranks is None
    if quantize == "int8" or (quantize == "int4" and not packs):
        why = why_not or "it runs on a CPU, with dtype auto"
        raise ConfigError(f"quantize {quantize} is for the compiled CPU decoder, which cannot run this: {why}")
    source = _split_up(unquantised(source, blocks=packs))
    targets = {}
    if not random_weights:
        targets = checked_targets(family, spec, source)
    part, whole = (spec, None) if ranks is None else (rank_spec(spec, ranks), spec)

    def make() -> Model:
        on = torch.device(device)
        made = Model(part, device=on, dtype=dtype, length=length, scheme=scheme, invariant=invariant, ranks=ranks)
        if packs:
            keep_four_bits(made, None if quantize == "int4" else four_bit_modules(targets, source))
        return made

    mapped = None if held is None else map_model(make, held)
    model = mapped or make()
    if mapped is None and random_weights:
        fill_random(model, seed, whole)
    elif mapped is None:
        fill_weights(model, targets, source, progress, whole)
    model.finish(mapped=mapped is not None)
    if mapped is None and held is not None:
        hold_model(model, held)
    model.notes += _other_modalities(family, spec, source)
    if why_not is not None:
        if why_not == cpu.available():  # it could run, were it built
            log.warning("%s; until then steps take several times as long, on plain torch", why_not)
        model.notes.append(f"decoder: plain torch, not compiled: {why_not}")
    return model


def load_compiled(
    source: WeightSource,
    *,
    threads: int,
    quantize: Quantize = "auto",
    isa: str | None = None,
    length: int | None = None,
    sparse: SparseAttention | None = None,
    held: WeightMemory | None = None,
    progress: Progress | None = None,
) -> CompiledModel:
    """For the compiled CPU decoder: matrices stay quantised as they are stored, others are quantised. `isa`: the kernel
    set, if it is not to be the best."""
    family, spec = read_family(source)
    spec = spec if sparse is None else spec.sparsified(sparse)
    packable = _packable(source)
    targets = checked_targets(family, spec, packable)
    model = Model(spec, device=torch.device("cpu"), dtype=torch.float32, length=length)
    found = packed_matrices(model.modules(), targets, packable, four_bits=quantize == "int4")
    places = pack_weights(model, found, isa, held)
    modules = model.modules()
    left = {name: t for name, t in targets.items() if not (places.filled and is_packed(modules[t.module], t))}
    fill_weights(model, left, packable, progress)
    model.finish()
    if places.to_publish is not None:
        places.to_publish.publish(b"")
    model.notes += _other_modalities(family, spec, packable)
    return CompiledModel(model, threads=threads, isa=isa, kept=_kept(found, quantize))


def resident_bytes(
    source: WeightSource,
    device: torch.device,
    dtype: torch.dtype,
    quantize: Quantize = "auto",
    scheme: QuantScheme | None = None,
) -> int:
    """What the weights take where torch runs them, by the shapes that they will have."""
    family, spec = read_family(source)
    model = Model(spec, device=torch.device("meta"), dtype=dtype, scheme=scheme)
    if can_keep(device, dtype) and scheme is None:
        source = _split_up(unquantised(source, blocks=True))
        targets = targets_of(family, spec, source)
        keep_four_bits(model, None if quantize == "int4" else four_bit_modules(targets, source))
    return sum(tensor.nbytes for module in model.modules().values() for tensor in module.tensors().values())


def compiled_refusal(
    source: WeightSource, device: torch.device, *, random_weights: bool = False, quantize: Quantize = "auto"
) -> str | None:
    """None if the compiled decoder can run what `source` holds, else the reason it cannot."""
    if random_weights:
        return "random weights are not quantised"
    if (why_not := refusal(read_family(source)[1], device)) is not None or quantize != "none":
        return why_not
    packed = _packed(source, quantize)[1]
    plain = next((name for name, each in _of_layers(packed) if each.stored in FLOATS), None)
    return None if plain is None else f"weights of {plain} are not quantised, and are not to be"


def packed_weights(source: WeightSource, quantize: Quantize = "auto") -> tuple[int, str]:
    """Bytes that the weights take in the compiled decoder, and how they are kept, for people."""
    model, packed = _packed(source, quantize)
    needs = {(name, *place): shape for name, m in model.modules().items() for place, shape in m.needs().items()}
    plain = [place for place in needs if place[1] != "weight" or (place[0], place[2]) not in packed]
    later = {place for place in plain if place[1] == "weight" and place[0].endswith(PACKED_LATER)}
    floats = sum(math.prod(needs[place]) for place in plain if place not in later)
    matrices = [*packed.values(), *(Packed(needs[place][0], needs[place][1]) for place in later)]
    return matrices_bytes(matrices) + 4 * floats, _kept(packed, quantize)


def _packed(source: WeightSource, quantize: Quantize) -> tuple[Model, dict[PackedPlace, Packed]]:
    """A model of nothing but shapes, and what of it would be packed."""
    family, spec = read_family(source)
    source = _packable(source)
    model = Model(spec, device=torch.device("meta"), dtype=torch.float32)
    targets = checked_targets(family, spec, source)
    return model, packed_matrices(model.modules(), targets, source, four_bits=quantize == "int4")


def _of_layers(packed: Mapping[PackedPlace, Packed]) -> list[tuple[str, Packed]]:
    return [(name, each) for (name, _), each in packed.items() if name.startswith("layers.")]


def _kept(packed: Mapping[PackedPlace, Packed], quantize: Quantize) -> str:
    """How the layers' matrices are, for people."""
    stored = {each.stored in FLOATS for _, each in _of_layers(packed)}
    rounded = f"quantised to {4 if quantize == 'int4' else 8} bits"
    if stored == {True}:
        return f"weights {rounded}"
    return "weights stay quantised" + (f", plain ones are {rounded}" if True in stored else "")


def _packable(source: WeightSource) -> WeightSource:
    """As the compiled decoder reads it."""
    return _split_up(unquantised(source, blocks=True))


def _split_up(source: WeightSource) -> WeightSource:
    """Tensors as families name them, however a file stacks or shapes them."""
    return ExpertTensors(GgufTensors(source) if is_gguf(source.metadata()) else source)


def checked_targets(family: Architecture, spec: DecoderSpec, source: WeightSource) -> dict[str, Target]:
    """Where each stored tensor goes, if together they are what the spec needs."""
    targets = targets_of(family, spec, source)
    check_targets(targets, Model(spec, device=torch.device("meta"), dtype=torch.float32), source)
    return targets


def targets_of(family: Architecture, spec: DecoderSpec, source: WeightSource) -> dict[str, Target]:
    """StoredTensor name → where it goes; names the family does not know are an error, since ignoring one (a bias, an
    adapter) would silently run another model."""
    found = {name: family.target(name, spec) for name in source.tensors()}
    unknown = [name for name, target in found.items() if target is None]
    if unknown:
        raise ModelFileError(f"weights of {spec.architecture} have unexpected tensors: {_some(unknown)}")
    left_out = (IGNORED, OTHER_MODALITY)
    return {name: target for name, target in found.items() if target is not None and target.module not in left_out}


def _other_modalities(family: Architecture, spec: DecoderSpec, source: WeightSource) -> list[str]:
    """Notes on what was left out of a multimodal checkpoint."""
    found = (family.target(name, spec) for name in source.tensors())
    count = sum(target is not None and target.module == OTHER_MODALITY for target in found)
    return [f"text only: {count} tensors of other modalities are left out"] if count else []


def check_targets(targets: dict[str, Target], model: Model, source: WeightSource) -> None:
    """Every place filled once, by a tensor of its shape."""
    needs = {name: module.needs() for name, module in model.modules().items()}
    filled: dict[Place, str] = {}
    tensors = source.tensors()
    for name, target in targets.items():
        shape = tensors[name].shape[::-1] if target.transposed else tensors[name].shape
        for place in _places(name, target, shape, needs.get(target.module, {})):
            if place in filled:
                raise ModelFileError(f"weights have the same tensor twice: {filled[place]!r} and {name!r}")
            filled[place] = name
    missing = [
        f"{module}.{kind}" + (f" (part {part})" if part else "")
        for module, pieces in needs.items()
        for kind, part in pieces
        if (module, kind, part) not in filled
    ]
    if missing:
        raise ModelFileError(f"weights of {model.spec.architecture} are incomplete, nothing fills: {_some(missing)}")


def _places(
    name: str, target: Target, shape: tuple[int, ...], needs: dict[tuple[str, int], tuple[int, ...]]
) -> list[Place]:
    """The places a tensor fills: parts from target.part on, until its rows are used up."""
    if (target.kind, target.part) not in needs:
        raise ModelFileError(f"weights have tensor {name!r}, which the model's config has no place for")
    places: list[Place] = []
    first, rows = needs[target.kind, target.part], 0
    if len(shape) != len(first):
        raise ModelFileError(f"tensor {name!r} has shape {shape}, the model's config needs {first}")
    for part in range(target.part, len(needs)):
        wanted = needs.get((target.kind, part))
        if wanted is None or rows >= shape[0]:
            break
        rows += wanted[0]
        places.append((target.module, target.kind, part))
    expected = (rows, *first[1:])
    if shape != expected:
        raise ModelFileError(f"tensor {name!r} has shape {shape}, the model's config needs {expected}")
    return places


def rank_spec(spec: DecoderSpec, ranks: Ranks) -> DecoderSpec:
    """What a rank runs of a model."""
    if ranks.pipeline:
        return staged_spec(spec, ranks.rank, ranks.size)
    if ranks.context:
        spec = context_spec(spec, ranks.size)
        return spec if ranks.tensor is None else rank_spec(spec, ranks.tensor)
    return sharded_spec(spec, ranks.size, ranks.rank, whole_experts=ranks.whole_experts)


@dataclass(frozen=True)
class _Place:
    """A module of a whole model, what a rank has in its place, if anything, and which part of it that is; None: all."""

    whole: Module
    module: Module | None
    shard: Shard | None = None


def _placed(model: Model, spec: DecoderSpec | None) -> dict[str, _Place]:
    """By the names of the whole model, of which `spec` is; None: this is the whole."""
    own, ranks = model.modules(), model.pipeline or model.ranks
    if ranks is None or spec is None:
        return {name: _Place(module, module) for name, module in own.items()}
    whole = Model(spec, device=torch.device("meta"), dtype=model.dtype).modules()
    if not ranks.pipeline:
        parts = shards(spec, ranks.rank, ranks.size, whole_experts=ranks.whole_experts)
        return {name: _Place(module, own[name], parts.get(name)) for name, module in whole.items()}
    parts, count = stage_shards(ranks.rank), len(spec.layers)
    here = {name: own_module(name, count, ranks.rank, ranks.size) for name in whole}
    return {name: _Place(module, own.get(here[name] or ""), parts.get(name)) for name, module in whole.items()}


def fill_weights(
    model: Model,
    targets: dict[str, Target],
    source: WeightSource,
    progress: Progress | None,
    whole: DecoderSpec | None = None,
) -> None:
    """`whole`: what the model is a rank's part of."""
    tensors, placed = source.tensors(), _placed(model, whole)
    total, done = sum(tensors[name].nbytes for name in targets), 0
    for name, target in targets.items():
        place = placed[target.module]
        if place.module is not None:
            stored = target.stored(tensors[name], source.read(name))
            if place.shard is None:
                place.module.load(target.kind, target.part, stored)
            else:
                _load_part(place.module, place.whole, place.shard, target, stored)
        done += tensors[name].nbytes
        if progress is not None:
            progress(done, total)


def _load_part(module: Module, full: Module, shard: Shard, target: Target, stored: StoredTensor) -> None:
    """A rank's part of a stored tensor; all of it is unpacked on the way."""
    if isinstance(module, Linear) and isinstance(full, Linear):
        like = module.bias if target.kind == "bias" else None
        numbers = torch.empty(stored.shape, dtype=module.dtype if like is None else like.dtype)
        stored.copy_into(numbers)
        put_rows(module, shard, target.kind, sum(full.parts[: target.part]), numbers)
    elif isinstance(module, Plain) and isinstance(full, Plain):
        own = module.tensors()[target.kind]
        numbers = torch.empty(full.tensors()[target.kind].shape, dtype=own.dtype)
        stored.copy_into(numbers)
        _put_tensor(own, shard, numbers)


def _put_tensor(own: torch.Tensor, shard: Shard, numbers: torch.Tensor) -> None:
    """A rank's rows of a tensor; what stands for nothing (rows behind the vocabulary) is zeros."""
    kept = shard.cut(numbers, shard.rows)
    own[: len(kept)] = kept
    own[len(kept) :] = 0


def put_rows(module: Linear, shard: Shard, kind: str, first: int, numbers: torch.Tensor) -> None:
    """What a rank has of rows of the whole matrix, from `first` on, or of its bias."""
    begin, kept = shard.place(first, len(numbers))
    if kind == "weight":
        module.scheme.put(module.state, begin, shard.cut(numbers, kept).to(module.device))
    elif module.bias is not None:
        biases = numbers if kept is None else numbers[kept]
        module.bias[begin : begin + len(biases)] = biases if shard.biased else 0


def fill_random(model: Model, seed: int, whole: DecoderSpec | None = None) -> None:
    """Small normal matrices, norms that change nothing, no biases: drawn on the device, the same for a seed there,
    however many ranks share them."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for place in _placed(model, whole).values():
        if isinstance(place.whole, Linear) and not place.whole.tied:
            _draw_matrix(place.whole, place, model, generator)
            continue
        for kind, tensor in place.whole.tensors().items():
            own = None if place.module is None else place.module.tensors()[kind]
            if tensor.dim() > 1 and own is tensor:
                tensor.normal_(0, 0.02, generator=generator)
            elif tensor.dim() > 1:
                drawn = torch.empty(tensor.shape, device=model.device, dtype=tensor.dtype)
                drawn.normal_(0, 0.02, generator=generator)
                if own is not None:
                    _put_tensor(own, place.shard or Shard(), drawn)
            elif own is not None:
                own.fill_(0 if kind == "bias" else 1)


def _draw_matrix(shape: Linear, place: _Place, model: Model, generator: torch.Generator) -> None:
    step, module = max(1, SLICE // shape.columns), place.module
    for first in range(0, sum(shape.parts), step):
        size = (min(step, sum(shape.parts) - first), shape.columns)
        drawn = torch.empty(size, device=model.device, dtype=model.dtype).normal_(0, 0.02, generator=generator)
        if isinstance(module, Linear):
            put_rows(module, place.shard or Shard(), "weight", first, drawn)
    if isinstance(module, Linear) and module.bias is not None:
        module.bias.zero_()


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
