"""The compiled program of a decoder, as a Python object over the library.

Refuses to know: names of tensors, families, files.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.kernels.attention_backend import SPARSE_LOCAL, Batch, LayerObserver
from quire.kernels.cpu import shared_object as lib
from quire.kernels.cpu import structs, weights
from quire.kernels.cpu.native_sampling import NativeSampling
from quire.kernels.cpu.packed_adapter import PackedAdapter, Update
from quire.kernels.hidden_state_tap import HiddenStateTap
from quire.kernels.kv_views import KVViews
from quire.kernels.state_views import Round
from quire.types.errors import QuireError
from quire.types.kv import RESIDUAL

# in the order of csrc/kernels.h
KV_KINDS: tuple[str, ...] = ("float32", "float16", "int8", "fp8", "int4", "kivi4", "kivi2")

_REFUSALS = {
    1: "a token id is outside the vocabulary",
    2: "a KV slot is outside the page pool",
    3: "a page table names a page outside the pool",
    4: "the batch's shapes or positions contradict each other",
    5: "a token has an adapter that is not loaded",
    6: "a segment names a cell that is not there",
}


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

    return structs.LAYER_WRITTEN(written)


def segments_of(rounds: list[Round]) -> tuple[np.ndarray, np.ndarray]:
    """Segments [segments, 4] int32, round by round (start, tokens, source, target), and where each round begins."""
    begins, segments = [0], []
    for groups in rounds:
        for some in groups:
            cells = torch.stack((some.sources, some.targets), dim=1).numpy()
            segments.append(np.column_stack((some.starts, some.counts, cells)))
        begins.append(begins[-1] + sum(len(some.starts) for some in groups))
    return np.concatenate(segments).astype(np.int32), np.asarray(begins, dtype=np.int32)


class NativeProgram:
    """A decoder ready to run. Layers' places in the pages come with the KV of the first step."""

    def __init__(self, decoder: weights.Decoder, *, threads: int, isa: str | None = None):
        self.isa = isa or lib.features()[0]
        self._library = lib.native()
        self._decoder = decoder  # keeps the packed matrices
        self._keep: list[Any] = []  # what else the structs point at
        self._threads, self._pool = threads, self._library.quire_pool(threads)
        weakref.finalize(self, self._library.quire_pool_free, self._pool)
        self._program: int | None = None
        self._free: weakref.finalize | None = None
        self._kv: KVViews | None = None
        self._step = structs.Step()
        self._adapters: list[PackedAdapter | None] = [None]  # by slot; the first is none
        self._width = -(-decoder.head.rows // 16) * 16

    def sampling(self) -> NativeSampling:
        """Samples on this program's threads, which it must not outlive."""
        return NativeSampling(self._pool, self._threads, self.isa)

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
        hidden = torch.empty(tokens, self._decoder.hidden)
        for struct, group in zip(self._groups, batch.groups, strict=True):
            table = group.page_table
            struct.page_table, struct.table_stride = table.data_ptr(), table.stride(0)
            struct.kv_slots, struct.tokens_per_page = group.kv_slots.data_ptr(), group.tokens_per_page
            struct.bounds = None
        step.tokens, step.rows = tokens, batch.rows
        step.ids, step.positions = input_ids.data_ptr(), batch.positions.data_ptr()
        step.query_start, step.hidden = batch.query_start.data_ptr(), hidden.data_ptr()
        step.pool, step.pages = pool.data_ptr(), pool.shape[0]
        step.layers = self._decoder.layers if layers is None else layers
        keep = [self._states(batch, kv), self._tapped(batch, tap), self._extras(batch)]  # until the step is done
        failures: list[Exception] = []
        step.observed = None
        if batch.observer is not None:
            keep.append(observed := torch.zeros(self._decoder.layers, dtype=torch.uint8))
            observed[list(batch.observer.layers)] = 1
            step.observed, step.written = observed.data_ptr(), _callback(batch.observer, failures)
        refusal = self._library.quire_forward(self._program, ctypes.byref(step))
        del keep
        step.written = structs.LAYER_WRITTEN()
        if failures:
            raise failures[0]
        if refusal:
            raise QuireError(f"the compiled decoder refused a step: {_REFUSALS[refusal]}")
        return hidden

    def _states(self, batch: Batch, kv: KVViews) -> Any:
        """Segments for recurrent layers."""
        step = self._step
        step.round_count = len(batch.states)
        if not batch.states or kv.cells is None:
            return None
        segments, begins = segments_of(batch.states)
        step.segments, step.rounds = segments.ctypes.data, begins.ctypes.data
        step.cells, step.cell_stride = kv.cells.shape[0], kv.cells.stride(0)
        return segments, begins

    def _tapped(self, batch: Batch, tap: HiddenStateTap | None) -> Any:
        step = self._step
        step.tap_count = 0
        if tap is None or not tap.layers:
            return None
        tapping = torch.tensor(tap.layers, dtype=torch.int32)
        tapped = torch.empty(len(tapping), batch.rows, self._decoder.hidden)
        step.taps, step.tapped, step.tap_count = tapping.data_ptr(), tapped.data_ptr(), len(tapping)
        tap.states = list(tapped)
        return tapping

    def _extras(self, batch: Batch) -> Any:
        """Trees of drafts, rows that ask what they pay, adapters, sparse rows."""
        step = self._step
        step.tree_base = step.tree_path = step.asks = step.sparse = None
        asks = budgets = None
        if batch.paths is not None:
            step.tree_base, step.tree_path = batch.paths.base.data_ptr(), batch.paths.path.data_ptr()
        step.adapters = None if batch.adapters is None else batch.adapters.data_ptr()
        if batch.mass is not None:
            asks = torch.zeros(batch.rows, dtype=torch.uint8)
            asks[batch.asks] = 1
            step.asks, step.mass, step.mass_runs = asks.data_ptr(), batch.mass.data_ptr(), batch.mass.shape[1]
            step.mass_tokens = batch.mass_tokens or batch.groups[0].tokens_per_page
        if batch.sparse is not None:
            budgets = torch.tensor(batch.sparse.pages, dtype=torch.int32)
            step.sparse, step.sparse_local = budgets.data_ptr(), SPARSE_LOCAL
            for struct, bounds in zip(self._groups, batch.sparse.bounds, strict=True):
                struct.bounds = None if bounds is None else bounds.data_ptr()
        return asks, budgets

    def reserve_adapters(self, slots: int, rank: int) -> None:
        """Room for LoRA adapters of up to this rank, in slots 1 .. slots."""
        self._adapters = [None] * (slots + 1)
        self._step.adapter = (ctypes.POINTER(structs.AdapterLayer) * (slots + 1))()
        self._step.adapter_count, self._step.adapter_rank = slots + 1, -(-rank // 32) * 32

    def set_adapter(self, slot: int, layers: list[dict[str, Update]]) -> None:
        """By layer the updates of its matrices, by their names in `AdapterLayer`."""
        packed = PackedAdapter(layers, self._step.adapter_rank)
        self._step.adapter[slot] = ctypes.cast(packed.layers, ctypes.POINTER(structs.AdapterLayer))
        self._adapters[slot] = packed  # only now is what it replaces given back

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden] → logits [rows, vocabulary] float32."""
        hidden = hidden.contiguous()
        out = torch.empty(hidden.shape[0], self._width)
        if hidden.shape[0]:
            assert self._program is not None, "a step comes first"
            self._library.quire_logits(self._program, hidden.data_ptr(), hidden.shape[0], out.data_ptr(), self._width)
        return out[:, : self._decoder.head.rows]

    def embeddings(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of token ids [tokens]: [tokens, hidden] float32."""
        return self._decoder.embed.dense(tokens.tolist())

    def forget_pages(self) -> None:
        """Those of the steps before are gone; the next comes with others."""
        self._kv = None

    def replace(self, decoder: weights.Decoder) -> None:
        """The same decoder with other numbers; what is in pages already stays as it is."""
        self._decoder = decoder
        self._kv = None  # to build again

    def _build(self, kv: KVViews) -> None:
        """For these pages."""
        if self._free is not None:
            self._free()
            self._keep.clear()
        decoder, layout = self._decoder, kv.layout
        places = {
            layer: _Place(index, place)
            for index, group in reversed([*enumerate(layout.groups)])  # latest tokens are found through the others
            for place, layer in enumerate(group.layers)
        }
        for index, layer in enumerate(decoder.layer):
            if (attending := layer.attention or layer.latent) is not None:
                kept_by = index if attending.kept_by is None else attending.kept_by
                attending.kv_group, attending.place = places[kept_by]
            if (recurrent := layer.delta or layer.mamba or layer.conv) is not None:
                state = kv.states[index]
                recurrent.state = weights.State(state.window.data_ptr(), state.matrix.data_ptr())
        struct = structs.fill(structs.Decoder, decoder, self._keep)
        self._program = self._library.quire_program(ctypes.byref(struct), lib.kernels(self.isa), self._pool)
        self._free = weakref.finalize(self, self._library.quire_program_free, self._program)
        self._kv = kv
        self._groups = (structs.StepGroup * len(layout.groups))()
        self._step.group, self._step.groups = self._groups, len(layout.groups)
        for group_struct, group in zip(self._groups, layout.groups, strict=True):
            group_struct.layers, group_struct.parts = len(group.layers), group.parts
            group_struct.kind = KV_KINDS.index(group.dtype or layout.dtype)
            group_struct.latest = -1 if group.residual is None else group.residual
        self._step.residual = RESIDUAL
        self._step.page_bytes = layout.page_bytes
