"""Packed weights and the program that runs them, as Python objects over the library.

Owns native memory and frees it when collected. Refuses to know: names of tensors, families, files.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from quire.kernels.attention_backend import SPARSE_LOCAL, Batch, LayerObserver
from quire.kernels.cpu import shared_object as lib
from quire.kernels.cpu.native_draw import CompiledDraw
from quire.kernels.hidden_state_tap import HiddenStateTap
from quire.kernels.kv_views import KVViews
from quire.kernels.reference.dequant import dequantize
from quire.types.errors import QuireError
from quire.types.kv import RESIDUAL


class Form(NamedTuple):
    """How a matrix is packed: see csrc/common.h."""

    number: int  # of the stored kind in pack.cpp
    bits: int
    run: int = 1  # blocks of 32 that share fp16 factors


# By a StoredTensor's kind. Others go through float32 to 8 bits with a scale per 32: at least twice as fine as 6 bits.
DIRECT = {
    "Q4_0": Form(0, 4), "Q4_1": Form(1, 4), "Q4_K": Form(3, 4), "Q5_0": Form(5, 5), "Q5_1": Form(6, 5),
    "Q8_0": Form(2, 8), "Q5_K": Form(7, 5, 8), "Q6_K": Form(8, 6, 8),
}  # fmt: skip
FLOAT = Form(4, 8)
# Kernel sets that unpack 5 or 6 bits in more time than they read 8, or may (docs/performance.md); those that give the
# same bits stand together.
AS_BYTES = ("neon", "i8mm", "avx512", "amx")
SLICE = 1 << 22  # elements dequantised at a time
ALIGN = 64

# in the order of csrc/common.h
KV_KINDS: tuple[str, ...] = ("float32", "float16", "int8", "fp8", "int4", "kivi4", "kivi2")

_REFUSALS = {
    1: "a token id is outside the vocabulary",
    2: "a KV slot is outside the page pool",
    3: "a page table names a page outside the pool",
    4: "the batch's shapes or positions contradict each other",
    5: "a token has an adapter that is not loaded",
}


def form_of(kind: str, isa: str | None = None) -> Form:
    """For a kernel set: by name, or the best."""
    form = DIRECT.get(kind, FLOAT)
    if form.bits in (5, 6) and (isa or lib.features()[0]) in AS_BYTES:
        return form._replace(bits=8) if kind == "Q5_0" else FLOAT  # whose numbers are those of 8 bits
    return form


class Store:
    """One block of memory for packed matrices, in huge pages where the system gives them; or one that is `given`, of
    zeros (uint8) or what was packed there before, which stays its owner's."""

    def __init__(self, size: int, given: torch.Tensor | None = None):
        self._at = 0
        self._size = max(size, ALIGN)
        self._given = given
        if given is not None:
            self._base = given.data_ptr()
            return
        base = lib.native().quire_reserve(self._size)
        if not base:
            raise MemoryError(f"no memory for {self._size} bytes of packed weights")
        self._base = int(base)
        weakref.finalize(self, lib.native().quire_release, self._base, self._size)

    def take(self, size: int) -> int:
        start, self._at = self._at, self._at + -(-size // ALIGN) * ALIGN
        if self._at > self._size:
            raise MemoryError("packed weights need more than was reserved for them")
        return self._base + start

    @staticmethod
    def needs(rows: int, columns: int, kind: str, isa: str | None = None) -> int:
        form = form_of(kind, isa)
        size = int(lib.native().quire_matrix_bytes(rows, columns, form.bits, form.run))
        return -(-size // ALIGN) * ALIGN


class PackedMatrix:
    """A matrix [rows, columns] in the layout of csrc/common.h, filled from stored blocks. `isa`: the kernel set it is
    packed for; all can multiply by it."""

    def __init__(self, store: Store, rows: int, columns: int, kind: str, isa: str | None = None):
        self.form = form = form_of(kind, isa)
        if columns % (32 * form.run):
            raise ValueError(f"packed matrices take multiples of {32 * form.run} columns, not {columns}")
        self.store = store
        self.kind = kind
        self.rows, self.columns = rows, columns
        place = store.take(Store.needs(rows, columns, kind, isa))
        self.struct = lib.Matrix(place, rows, columns, form.bits, form.run)

    def fill(self, raw: torch.Tensor) -> bool:
        """From raw bytes by row, [rows, bytes per row] uint8. False: not all that is stored is finite."""
        assert raw.shape[0] == self.rows
        finite = True
        step = max(1, SLICE // self.columns)
        for first in range(0, self.rows, step):
            piece = raw[first : first + step]
            if self.form == FLOAT:
                piece = dequantize(piece, self.kind).float()
            piece, number = piece.contiguous(), self.form.number
            done = lib.native().quire_pack(number, piece.data_ptr(), first, piece.shape[0], ctypes.byref(self.struct))
            finite = finite and bool(done)
        return finite

    def scale(self, factors: torch.Tensor) -> None:
        """Multiply each row by a factor, a power of two: only the blocks' scales change."""
        factors = factors.float().contiguous()
        assert factors.shape == (self.rows,)
        lib.native().quire_scale(ctypes.byref(self.struct), factors.data_ptr())

    def dense(self, rows: Sequence[int] | None = None) -> torch.Tensor:
        """The matrix, or some of its rows, as floats, as packed: what multiplications mean."""
        wanted = range(self.rows) if rows is None else rows
        out = torch.empty(len(wanted), self.columns)
        for at, row in enumerate(wanted):
            lib.native().quire_unpack(ctypes.byref(self.struct), row, out[at].data_ptr())
        return out

    def linear(self, x: torch.Tensor, isa: str | None = None) -> torch.Tensor:
        """x [tokens, columns] float32, quantised as the program does → [tokens, rows]."""
        out = torch.empty(x.shape[0], -(-self.rows // 16) * 16)
        x = x.contiguous()
        lib.native().quire_linear(lib.kernels(isa), ctypes.byref(self.struct), x.data_ptr(), x.shape[0], out.data_ptr())
        return out[:, : self.rows]


@dataclass
class LayerWeights:
    """Vectors are float32; those named None are absent."""

    q: PackedMatrix
    k: PackedMatrix
    v: PackedMatrix
    o: PackedMatrix
    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    q_bias: torch.Tensor | None
    k_bias: torch.Tensor | None
    v_bias: torch.Tensor | None
    o_bias: torch.Tensor | None
    scale: float
    window: int | None
    sparse: bool = False  # whether queries may read only some pages


@dataclass
class DecoderWeights:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    rope_scale: float
    inverse_frequencies: torch.Tensor  # [rotary / 2] float32
    embed: PackedMatrix
    head: PackedMatrix
    final_norm: torch.Tensor
    layers: list[LayerWeights]

    def rescale_keys(self, factors: torch.Tensor) -> None:
        """Queries times powers of two, [layers, kv_heads, head_dim], keys times the largest of a layer over them; the
        scale of the scores makes up for it."""
        for layer, factor in zip(self.layers, factors, strict=True):
            most = factor.max()
            layer.scale /= most.item()
            if layer.q_norm is not None and layer.k_norm is not None:
                layer.q_norm *= factor[0]
                layer.k_norm *= most / factor[0]
                continue
            queries = factor.repeat_interleave(self.heads // self.kv_heads, dim=0).flatten()
            keys = most / factor.flatten()
            for matrix, bias, rows in ((layer.q, layer.q_bias, queries), (layer.k, layer.k_bias, keys)):
                matrix.scale(rows)
                if bias is not None:
                    bias *= rows


Update = tuple[torch.Tensor, torch.Tensor]  # A [rank, columns], B [rows, rank]


class PackedAdapter:
    """A LoRA adapter, packed to 8 bits as weights are: every A and B scaled to numbers around one, for their blocks'
    scales are fp16, and by how much lies beside them. Rows of B are padded to `rank`."""

    def __init__(self, layers: list[dict[str, Update]], rank: int):
        self.layers = (lib.AdapterLayer * len(layers))()
        self.updates: dict[tuple[int, str], tuple[PackedMatrix, PackedMatrix, float]] = {}  # A, B, and their scale
        pairs = [pair for layer in layers for pair in layer.values()]
        sizes = [size for a, b in pairs for size in ((a.shape[0], a.shape[1]), (b.shape[0], rank))]
        store = Store(sum(Store.needs(rows, columns, "F32") for rows, columns in sizes))
        for index, layer in enumerate(layers):
            for name, (a, b) in layer.items():
                padded = torch.nn.functional.pad(b, (0, rank - b.shape[1]))
                (packed_a, scale_a), (packed_b, scale_b) = (_normalised(store, each) for each in (a, padded))
                self.updates[index, name] = packed_a, packed_b, scale_a * scale_b
                setattr(self.layers[index], name, lib.LowRank(packed_a.struct, packed_b.struct, scale_a * scale_b))


def _normalised(store: Store, numbers: torch.Tensor) -> tuple[PackedMatrix, float]:
    most = numbers.abs().max().item() or 1.0
    packed = PackedMatrix(store, numbers.shape[0], numbers.shape[1], "F32")
    packed.fill((numbers.float() / most).contiguous().view(torch.uint8))
    return packed, most


class _Place(NamedTuple):
    kv_group: int
    place: int


def _callback(observer: LayerObserver, failures: list[Exception]) -> Any:
    """For the library to call, which no exception may pass through."""

    def written(layer: int) -> None:
        try:
            observer.layer_written(layer)
        except Exception as error:
            failures.append(error)

    return lib.LAYER_WRITTEN(written)


class NativeProgram:
    """A decoder ready to run. Layers' places in the pages come with the KV of the first step."""

    def __init__(self, weights: DecoderWeights, *, threads: int, isa: str | None = None):
        self.isa = isa or lib.features()[0]
        self._library = lib.native()
        self._weights = weights  # keeps all memory the structs point at
        self._threads = threads
        self._keep: list[torch.Tensor] = []
        self._pool = self._library.quire_pool(threads)
        weakref.finalize(self, self._library.quire_pool_free, self._pool)
        self._program: int | None = None
        self._free: weakref.finalize | None = None
        self._kv: KVViews | None = None
        self._step = lib.Step()
        self._adapters: list[PackedAdapter | None] = [None]  # by slot; the first is none
        self._width = -(-weights.head.rows // 16) * 16

    def drawer(self) -> CompiledDraw:
        """Draws on this program's threads, which it must not outlive."""
        return CompiledDraw(self._pool, self.isa)

    def forward(
        self,
        input_ids: torch.Tensor,
        batch: Batch,
        kv: KVViews,
        tap: HiddenStateTap | None = None,
        *,
        layers: int | None = None,
    ) -> torch.Tensor:
        """Token ids [tokens] → hidden states after the final norm [tokens, hidden] float32. With fewer `layers` than
        there are, only their K and V and those of the next are written, and what is returned says nothing."""
        if kv is not self._kv:
            self._build(kv)
        tokens, step, pool = input_ids.shape[0], self._step, kv.pool
        hidden = torch.empty(tokens, self._weights.hidden)
        for struct, group in zip(self._groups, batch.groups, strict=True):
            table = group.page_table
            struct.page_table, struct.table_stride = table.data_ptr(), table.stride(0)
            struct.kv_slots, struct.tokens_per_page = group.kv_slots.data_ptr(), group.tokens_per_page
            struct.bounds = None
        step.tokens, step.rows = tokens, batch.rows
        step.ids, step.positions = input_ids.data_ptr(), batch.positions.data_ptr()
        step.query_start, step.hidden = batch.query_start.data_ptr(), hidden.data_ptr()
        step.pool, step.pages = pool.data_ptr(), pool.shape[0]
        step.tree_base = step.tree_path = None
        if batch.paths is not None:
            step.tree_base, step.tree_path = batch.paths.base.data_ptr(), batch.paths.path.data_ptr()
        step.layers = len(self._weights.layers) if layers is None else layers
        step.tap_count = 0
        if tap is not None and tap.layers:
            tapping = torch.tensor(tap.layers, dtype=torch.int32)
            tapped = torch.empty(len(tapping), batch.rows, self._weights.hidden)
            step.taps, step.tapped, step.tap_count = tapping.data_ptr(), tapped.data_ptr(), len(tapping)
            tap.states = list(tapped)
        step.adapters = None if batch.adapters is None else batch.adapters.data_ptr()
        step.asks = None
        if batch.mass is not None:
            asks = torch.zeros(batch.rows, dtype=torch.uint8)
            asks[batch.asks] = 1
            step.asks, step.mass, step.mass_runs = asks.data_ptr(), batch.mass.data_ptr(), batch.mass.shape[1]
            step.mass_tokens = batch.mass_tokens or batch.groups[0].tokens_per_page
        step.sparse = None
        if batch.sparse is not None:
            budgets = torch.tensor(batch.sparse.pages, dtype=torch.int32)
            where = torch.tensor([layer.sparse for layer in self._weights.layers], dtype=torch.uint8)
            step.sparse, step.sparse_layers, step.sparse_local = budgets.data_ptr(), where.data_ptr(), SPARSE_LOCAL
            for struct, bounds in zip(self._groups, batch.sparse.bounds, strict=True):
                struct.bounds = None if bounds is None else bounds.data_ptr()
        failures: list[Exception] = []
        step.observed = None
        if batch.observer is not None:
            observed = torch.zeros(len(self._weights.layers), dtype=torch.uint8)
            observed[list(batch.observer.layers)] = 1
            step.observed, step.written = observed.data_ptr(), _callback(batch.observer, failures)
        refusal = self._library.quire_forward(self._program, ctypes.byref(step))
        step.written = lib.LAYER_WRITTEN()
        if failures:
            raise failures[0]
        if refusal:
            raise QuireError(f"the compiled decoder refused a step: {_REFUSALS[refusal]}")
        return hidden

    def reserve_adapters(self, slots: int, rank: int) -> None:
        """Room for LoRA adapters of up to this rank, in slots 1 .. slots."""
        self._adapters = [None] * (slots + 1)
        self._step.adapter = (ctypes.POINTER(lib.AdapterLayer) * (slots + 1))()
        self._step.adapter_count, self._step.adapter_rank = slots + 1, -(-rank // 32) * 32

    def set_adapter(self, slot: int, layers: list[dict[str, Update]]) -> None:
        """By layer the updates of its matrices, by their names in `LayerWeights`."""
        packed = PackedAdapter(layers, self._step.adapter_rank)
        self._step.adapter[slot] = ctypes.cast(packed.layers, ctypes.POINTER(lib.AdapterLayer))
        self._adapters[slot] = packed  # only now is what it replaces given back

    def rescale_keys(self, factors: torch.Tensor) -> None:
        """As `DecoderWeights.rescale_keys`; what is in pages already is of another scale."""
        self._weights.rescale_keys(factors)
        self._kv = None  # to build again

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden] → logits [rows, vocabulary] float32."""
        hidden = hidden.contiguous()
        out = torch.empty(hidden.shape[0], self._width)
        self._library.quire_logits(self._program, hidden.data_ptr(), hidden.shape[0], out.data_ptr(), self._width)
        return out[:, : self._weights.head.rows]

    def embeddings(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of token ids [tokens]: [tokens, hidden] float32."""
        return self._weights.embed.dense(tokens.tolist())

    def forget_pages(self) -> None:
        """Those of the steps before are gone; the next comes with others."""
        self._kv = None

    def _build(self, kv: KVViews) -> None:
        """For these pages. Structs point into tensors; `_keep` holds those made here."""
        if self._free is not None:
            self._free()
            self._keep.clear()
        weights, layout = self._weights, kv.layout
        places = {
            layer: _Place(index, place)
            for index, group in reversed([*enumerate(layout.groups)])  # latest tokens are found through the others
            for place, layer in enumerate(group.layers)
        }
        layers = (lib.Layer * len(weights.layers))(
            *(self._layer(layer, places[i]) for i, layer in enumerate(weights.layers))
        )
        decoder = lib.Decoder(
            weights.hidden, weights.heads, weights.kv_heads, weights.head_dim, weights.intermediate,
            2 * weights.inverse_frequencies.shape[0], len(weights.layers), weights.eps, weights.rope_scale,
            weights.embed.struct, weights.head.struct, self._pointer(weights.final_norm),
            self._pointer(weights.inverse_frequencies), layers,
        )  # fmt: skip
        self._program = self._library.quire_program(ctypes.byref(decoder), lib.kernels(self.isa), self._pool)
        self._free = weakref.finalize(self, self._library.quire_program_free, self._program)
        self._kv = kv
        self._groups = (lib.StepGroup * len(layout.groups))()
        self._step.group, self._step.groups = self._groups, len(layout.groups)
        for struct, group in zip(self._groups, layout.groups, strict=True):
            struct.layers = len(group.layers)
            struct.kind = KV_KINDS.index(group.dtype or layout.dtype)
            struct.latest = -1 if group.residual is None else group.residual
        self._step.residual = RESIDUAL
        self._step.page_bytes = layout.page_bytes

    def _layer(self, layer: LayerWeights, place: _Place) -> lib.Layer:
        return lib.Layer(
            *(getattr(layer, name).struct for name in ("q", "k", "v", "o", "gate", "up", "down")),
            *(self._pointer(getattr(layer, name)) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
            *(self._padded(getattr(layer, name)) for name in ("q_bias", "k_bias", "v_bias", "o_bias")),
            *place,
            layer.window or 0,
            layer.scale,
        )

    def _pointer(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.float().contiguous()
        self._keep.append(tensor)
        return tensor.data_ptr()

    def _padded(self, bias: torch.Tensor | None) -> int | None:
        """Kernels read whole groups of 16."""
        return None if bias is None else self._pointer(torch.nn.functional.pad(bias.float(), (0, -len(bias) % 16)))
