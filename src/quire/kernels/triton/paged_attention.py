"""`triton`: paged attention for ragged batches, prefill chunks and decoding rows together.

Short rows (a few query tokens: decoding, speculation) and long ones take the same kernel with different tiles, in one
launch each. Grids come from bounds the host knows, everything else is read on the device, so a plan made from the
bounds of a captured graph stays true whatever the graph is replayed with.

    rows, tokens:   1  1  480  4  1     ──►   short: pieces of their keys      long: those of blocks of their queries

Refuses to know: who owns pages, which rows share some (`cascade.py` finds out and hands the lists to `plan`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from quire.kernels.attention_backend import AttentionSpec, Batch, GroupBatch
from quire.kernels.kv_views import LayerKV
from quire.kernels.triton import configs, why_not
from quire.kernels.triton import fp8_unpack as pairing
from quire.kernels.triton.attention_kernels import attend_kernel
from quire.kernels.triton.configs import Tile
from quire.kernels.triton.dequantise_pages import Wide, widen_pages
from quire.kernels.triton.launch import counters, overlap, power_of_two, processors
from quire.kernels.triton.work_lists import list_pieces_kernel

MAX_HEAD_DIM = 256
LOG2E = 1.4426950408889634
EVERY = 1 << 30  # longer than any row


@dataclass(frozen=True)
class Bounds:
    """What a plan is made from: true for every batch it will run."""

    tokens: int
    rows: int
    shortest: int  # query tokens of a row
    longest: int
    longest_kv: int

    @classmethod
    def of(cls, batch: Batch) -> Bounds:
        counts = [count for count in batch.counts if count > 0] or [1]
        return cls(batch.tokens, batch.rows, min(counts), max(counts), max(batch.kv_lens, default=1))


@dataclass(frozen=True)
class Launch:
    form: str  # "pieces": `items` lists pieces of rows; "prefix": see `PrefixLists`
    tile: Tile
    blocks: int  # items, at most
    shortest: int  # query tokens of the rows it is for
    longest: int
    splits: int  # pieces that make a round; of a shared prefix's keys: parts, at most
    split_min: int  # tiles of keys of a piece, at least; of a shared prefix: keys of a part
    spare: int = 0  # pieces more than there are blocks of queries, at most
    steady: bool = False  # one instruction sequence for every tile: the same bits wherever a query lies in its block
    items: torch.Tensor | None = None  # int32, on the device


@dataclass(frozen=True)
class PrefixLists:
    """Groups of rows that share their first keys, as the kernel reads them; `cascade.py` makes these."""

    items: torch.Tensor  # int32 [n, 4]: (row whose table to read or -1, first member, members, shared keys)
    members: torch.Tensor  # int32 [m, 2]: (row, index of the query token in it)
    row_begin: torch.Tensor  # int32 [rows]: first key of a row that no group covers
    block_m: int  # the items were cut for this tile
    longest: int  # bound of the shared keys


@dataclass(frozen=True)
class Plan:
    launches: tuple[Launch, ...]
    prefix: PrefixLists | None = None
    ahead: Launch | None = None  # over the shared prefixes, before the others
    wide: Wide | None = None  # what rows with many queries read instead of 8-bit pages


class TritonAttention:
    name = "triton"

    def __init__(self, *, invariant: bool = False):
        """`invariant`: one tiling and one split of the keys for every row, so that a row's result is the same bits
        in any batch."""
        self.invariant = invariant
        self.shares = not invariant  # attending together sums in another order

    def supports(self, spec: AttentionSpec, device: torch.device) -> str | None:
        if spec.values_from is not None:
            return "its kernels read values apart from keys"
        if spec.head_dim > MAX_HEAD_DIM:
            return f"head_dim {spec.head_dim} is more than {MAX_HEAD_DIM}"
        if spec.heads // spec.kv_heads > 64:
            return f"{spec.heads // spec.kv_heads} query heads share a KV head, more than 64"
        return why_not(device)

    def plan(
        self, batch: Batch, group: GroupBatch, spec: AttentionSpec, prefix: PrefixLists | None = None,
        bounds: Bounds | None = None,
    ) -> Plan:  # fmt: skip
        """`bounds`: of all batches this plan is for, if not of this one only."""
        bounds = bounds or Bounds.of(batch)
        wide = None
        if batch.exact and spec.stored < spec.itemsize and not self.invariant:
            wide = Wide.of(batch, group, _short(spec) + 1)
        prefix = prefix or group.prefix
        launches = plan_launches(bounds, spec, processors(batch.positions.device), self.invariant, wide is not None)
        ahead = None if prefix is None else prefix_launch(prefix, spec, processors(batch.positions.device))
        return Plan(tuple(_with_items(one, batch, spec, prefix) for one in launches), prefix, ahead, wide)

    def forward(
        self, spec: AttentionSpec, q: torch.Tensor, kv: LayerKV, batch: Batch, group: GroupBatch, plan: Plan,
        lse: torch.Tensor | None = None, out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """`lse`, float32 [tokens, heads], takes the log-sum of each query's scores where given."""
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        shared = None
        if spec.sinks is not None and lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        if plan.ahead is not None:
            shared = (out.new_empty(q.shape), out.new_empty(q.shape[:2], dtype=torch.float32))
            _run(plan.ahead, spec, q, kv, batch, group, *shared, prefix=plan.prefix)
        for launch in plan.launches:
            if plan.wide is not None and launch.longest == EVERY:
                kv, group = widen_pages(kv, plan.wide.pages, q.dtype), plan.wide.group  # this launch is the last
            _run(launch, spec, q, kv, batch, group, out, lse, prefix=plan.prefix, shared=shared)
        if spec.sinks is not None and lse is not None:  # they take their share of what the keys were given
            out.mul_((lse - spec.sinks).sigmoid_().unsqueeze(-1))
        return out


def plan_launches(bounds: Bounds, spec: AttentionSpec, sms: int, invariant: bool, wide: bool = False) -> list[Launch]:
    """Which launches cover every batch within the bounds. `wide`: rows with many queries read pages like these."""
    group = spec.heads // spec.kv_heads
    if invariant:
        tile = configs.INVARIANT[spec.stored]
        tile = replace(tile, block_m=max(tile.block_m, power_of_two(group)))
        blocks, size = _most_blocks(bounds, 1, tile.block_m // group), configs.INVARIANT_SPLIT
        pieces = blocks * -(-bounds.longest_kv // size)
        return [Launch("pieces", tile, pieces, 1, EVERY, 1, size // tile.block_n, pieces - blocks, steady=True)]
    few, many = _tile("few", spec.stored, spec), _tile("many", spec.itemsize if wide else spec.stored, spec)
    short = _short(spec)
    launches = []
    if bounds.shortest <= short:
        rows = -(-bounds.rows // _unit(bounds.rows)) * _unit(bounds.rows)
        few = configs.crowd(rows * spec.kv_heads / sms, spec.stored, spec.head_dim) or few
        few = replace(few, block_m=max(few.block_m, power_of_two(group * short)))
        launches.append(_pieces(Launch("pieces", few, bounds.rows, 1, short, 1, 0), bounds.longest_kv, spec, sms))
    if bounds.longest > short:
        many = replace(many, block_m=max(many.block_m, power_of_two(group)))
        blocks = _most_blocks(bounds, short + 1, many.block_m // group)
        launches.append(_pieces(Launch("pieces", many, blocks, short + 1, EVERY, 1, 0), bounds.longest_kv, spec, sms))
    return launches


def _unit(rows: int) -> int:
    """Captured steps of single tokens are padded to a multiple of this, at most; steps that are not are tiled alike, so
    that both give the same bits."""
    return 16 if rows <= 256 else 64


def _short(spec: AttentionSpec) -> int:
    """Query tokens of a row that fit the smallest tile; longer ones are cut into blocks."""
    return max(16 // (spec.heads // spec.kv_heads), 1)


def prefix_launch(prefix: PrefixLists, spec: AttentionSpec, sms: int) -> Launch:
    """A program a processor, if its members' queries, all told, are not more: two get in each other's way."""
    tile = configs.attention("prefix", spec.stored, spec.head_dim) if prefix.block_m > 16 else None
    tile = replace(tile or _tile("few", spec.stored, spec), block_m=prefix.block_m)
    tiles = -(-prefix.members.shape[0] * (spec.heads // spec.kv_heads) // tile.block_m)
    keys = max(configs.SPLIT_KEYS, tile.block_n)
    splits = min(sms // (tiles * spec.kv_heads), -(-prefix.longest // keys))
    return Launch("prefix", tile, prefix.items.shape[0], 1, EVERY, max(splits, 1), keys, items=prefix.items)


def _tile(kernel: str, element: int, spec: AttentionSpec) -> Tile:
    tile = configs.attention(kernel, element, spec.head_dim)
    assert tile is not None, "supports() refuses such heads"
    return tile


def _most_blocks(bounds: Bounds, least: int, block_q: int) -> int:
    """Blocks of rows of at least `least` tokens: whole ones, and one more for each such row."""
    return bounds.tokens // block_q + min(bounds.rows, bounds.tokens // least)


def _pieces(launch: Launch, longest: int, spec: AttentionSpec, sms: int) -> Launch:
    """So many that they fill the chip and end together, however different the rows are."""
    many = launch.longest == EVERY
    least = -(-(configs.BLOCK_SPLIT_KEYS if many else configs.SPLIT_KEYS) // launch.tile.block_n)
    if _seen(launch, longest, spec) <= least * launch.tile.block_n:
        return replace(launch, split_min=longest)
    fit = max(sms * launch.tile.pieces // spec.kv_heads, 2)
    if many:  # results of pieces take much memory there
        more = configs.ROUNDS * fit
        most = more if launch.blocks <= more else launch.blocks + more
        return replace(launch, blocks=most, splits=fit, split_min=least, spare=more)
    most = -(-launch.blocks * 5 // (4 * fit)) * fit + _unit(launch.blocks) - 1
    return replace(launch, blocks=most, splits=fit, split_min=least, spare=most)


def _seen(launch: Launch, longest: int, spec: AttentionSpec) -> int:
    """Keys that a row of `longest` attends, at most."""
    return longest if spec.window is None else min(longest, spec.window + launch.tile.block_m)


def _with_items(launch: Launch, batch: Batch, spec: AttentionSpec, prefix: PrefixLists | None = None) -> Launch:
    """List what a launch takes on, on the device."""
    rows, device = batch.query_start.shape[0] - 1, batch.query_start.device
    short = launch.longest < EVERY
    items = torch.empty(launch.blocks, 8, dtype=torch.int32, device=device)
    list_pieces_kernel[(rows,)](
        batch.positions, batch.query_start, batch.kv_len, batch.kv_len if prefix is None else prefix.row_begin, items,
        rows, launch.blocks, launch.splits, launch.split_min, launch.spare, launch.shortest, launch.longest,
        launch.tile.block_m // (spec.heads // spec.kv_heads), launch.tile.block_n,
        ROWS=max(power_of_two(rows), 2048), WINDOW=spec.window or 0, HAS_PREFIX=prefix is not None,
        STEADY=launch.steady, TRIES=1 if short else configs.ROUNDS, BLOCKS=1 if short else 32,
        PIECES=64 if short else 4, num_warps=8, **overlap(device),
    )  # fmt: skip
    return replace(launch, items=items)


def _run(
    launch: Launch, spec: AttentionSpec, q: torch.Tensor, kv: LayerKV, batch: Batch, group: GroupBatch,
    out: torch.Tensor, lse: torch.Tensor | None, *,
    prefix: PrefixLists | None, shared: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:  # fmt: skip
    tile, device = launch.tile, q.device
    padded = max(power_of_two(spec.head_dim), 16)
    apart = 1 if launch.form == "pieces" else launch.splits  # programs an item
    cut = launch.blocks if apart > 1 else min(launch.blocks, 2 * launch.spare)  # they come first, two a block at least
    slots = cut * spec.kv_heads
    partial = torch.empty(slots * apart * tile.block_m, padded, dtype=torch.float32, device=device)
    partial_lse = torch.empty(slots * apart * tile.block_m, dtype=torch.float32, device=device)
    k, v, (k_scales, v_scales) = kv.k_pages, kv.v_pages, (kv.k_scales, kv.v_scales)
    if scaled := k_scales is not None and v_scales is not None:
        beside = k_scales.stride()[:2]
    else:
        k_scales = v_scales = out  # placeholders
        beside = (0, 0)
    pairs = pairing.KINDS.get(k.dtype, "")
    strides = [stride // 2 if pairs else stride for stride in k.stride()[:3]]
    assert k.stride() == v.stride() and k.stride(3) == q.stride(2) == 1 and k.dtype != torch.uint8
    assert prefix is None or spec.window is None, "shared prefixes are for full attention"
    attend_kernel[(spec.kv_heads, launch.blocks, apart)](
        q, k, v, k_scales, v_scales, out, out if lse is None else lse,
        *(shared or (out, out)), batch.kv_len if prefix is None else prefix.row_begin,
        partial, partial_lse, counters(device, slots),
        launch.items, batch.kv_len if prefix is None else prefix.members,
        group.page_table, batch.positions, batch.query_start,
        spec.scale / (spec.softcap or 1.0) * LOG2E, launch.splits, launch.split_min, spec.heads,
        q.stride(0), q.stride(1), *strides, *beside, out.stride(0), out.stride(1), group.page_table.stride(0),
        FORM=launch.form, PAGE=group.tokens_per_page, D=spec.head_dim, DP=padded, GROUP=spec.heads // spec.kv_heads,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, WINDOW=spec.window or 0, CHUNKED=spec.chunked,
        SOFTCAP=(spec.softcap or 0.0) * LOG2E,
        SPLIT=launch.splits > 1 or launch.form == "pieces", HAS_PREFIX=shared is not None, HAS_LSE=lse is not None,
        TWO_PHASE=tile.phases == 2 and spec.window is None and not launch.steady,
        SCALED=scaled, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        PAIRS=pairs, NATIVE=not triton.knobs.runtime.interpret,
        num_warps=tile.warps, num_stages=tile.stages,
        **overlap(device),
    )  # fmt: skip
