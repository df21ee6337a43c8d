"""Which matrices of a model lie packed for the compiled CPU kernels, in what kind, and in whose memory.

All of them but the few that decide for a token where it goes, and how much of it is remembered: they are small, and
stay floats. Refuses to know: how any format packs, products.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from quire.kernels.cpu import PackedMatrix, Store
from quire.kernels.reference.dequant import FLOATS
from quire.model.blocks.linear import Linear, Module, Plain
from quire.model.decoder import Model
from quire.model.families.architecture import Target
from quire.model.loading.held_model import WeightMemory
from quire.model.loading.stored_tensor import StoredTensor
from quire.model.quantization.packed import FOUR_BIT_KIND, PackedScheme, fill
from quire.model.quantization.scheme import State
from quire.types.seams import WeightSource

PACKED_LATER = "kv_up"  # by the decoder, head by head
STAY_FLOATS = ("router", "ba", "shared_gate", PACKED_LATER)  # of a Linear
TABLES = ("embed", "layer_inputs")

PackedPlace = tuple[str, int]  # module, part


class Packed(NamedTuple):
    rows: int
    columns: int
    kind: str = "F32"  # of what it is packed from
    stored: str = "F32"

    def nbytes(self, isa: str | None) -> int:
        return Store.needs(self.rows, self.columns, self.kind, isa)


class PackedPlaces(NamedTuple):
    filled: bool  # what is packed is there: only the rest is left to load
    to_publish: WeightMemory | None  # once it is


class PackedTable(Plain):
    """Rows that are looked up, in the place of a plain table."""

    bias = None

    def __init__(self, matrix: PackedMatrix):
        self.matrix = matrix

    def needs(self) -> dict[tuple[str, int], tuple[int, ...]]:
        return {("weight", 0): (self.matrix.rows, self.matrix.columns)}

    def load(self, kind: str, part: int, stored: StoredTensor) -> None:
        fill([self.matrix], 0, stored)

    def tensors(self) -> State:
        return {}


def packed_matrices(
    modules: Mapping[str, Module], targets: Mapping[str, Target], source: WeightSource, *, four_bits: bool
) -> dict[PackedPlace, Packed]:
    """What is packed of a model, by module and part. `four_bits`: of its layers, what is not stored in fewer bits than
    a float."""
    tensors = source.tensors()
    kinds: dict[PackedPlace, str] = {}
    for name, target in targets.items():
        shape, place = tensors[name].shape, target.part
        left = shape[-1] if target.transposed else shape[0]
        needs = modules[target.module].needs() if target.kind == "weight" else {}
        as_stored = not (target.transposed or target.offset or target.negated_exp)
        while left > 0 and ("weight", place) in needs:
            kinds[target.module, place] = tensors[name].kind if as_stored else "F32"
            left -= needs["weight", place][0]
            place += 1
    found: dict[PackedPlace, Packed] = {}
    for name, module in modules.items():
        kept = isinstance(module, Linear) and not module.tied and name.split(".")[-1] not in STAY_FLOATS
        for (what, part), shape in module.needs().items() if kept or name in TABLES else ():
            if what == "weight":
                kind = kinds.get((name, part), "F32")
                rounded = four_bits and kind in FLOATS and name.startswith("layers.")
                found[name, part] = Packed(shape[0], shape[1], FOUR_BIT_KIND if rounded else kind, kind)
    return found


def matrices_bytes(packed: Iterable[Packed], isa: str | None = None) -> int:
    return sum(each.nbytes(isa) for each in packed)


def pack_weights(
    model: Model, found: Mapping[PackedPlace, Packed], isa: str | None, held: WeightMemory | None
) -> PackedPlaces:
    """Give the model's matrices packed places, before any is filled. `held`: where they are, if they are held, or are
    put."""
    modules = model.modules()
    size = matrices_bytes(found.values(), isa)
    block, filled = (None, False) if held is None else _held_block(held, size)
    store = Store(size, block)
    matrices = {place: PackedMatrix(store, p.rows, p.columns, p.kind, isa) for place, p in found.items()}
    by_module: dict[str, list[PackedMatrix]] = {}
    for (name, _), matrix in matrices.items():
        by_module.setdefault(name, []).append(matrix)
    for name, parts in by_module.items():
        module = modules[name]
        if isinstance(module, Linear):
            module.scheme = PackedScheme(parts)
    model.embed = PackedTable(by_module["embed"][0])
    if model.layer_inputs is not None:
        model.layer_inputs.table = PackedTable(by_module["layer_inputs"][0])
    return PackedPlaces(filled, None if filled or block is None else held)


def is_packed(module: Module, target: Target) -> bool:
    """Whether what a tensor fills of a model is packed."""
    if isinstance(module, Linear):
        return target.kind == "weight" and isinstance(module.scheme, PackedScheme)
    return isinstance(module, PackedTable)


def _held_block(held: WeightMemory, size: int) -> tuple[torch.Tensor | None, bool]:
    """Memory with all matrices packed, or to pack them into; none: they cannot be held."""
    if (found := held.find()) is not None:
        if [len(each) for each in found[0]] == [size]:
            return found[0][0], True
        held.discard("held weights are not those of this model; they are loaded")
    elif 0 < held.limit < size:
        held.refuse(f"weights are not held: they take {size:,} bytes, hold_weights allows {held.limit:,}")
    return (held.create(size) if size <= held.limit else None), False
