# mypy: allow-untyped-defs, allow-incomplete-defs
"""What the programs of an attention launch take on, listed on the device once a step for all layers.

    pieces   rows with few queries: their keys, cut so that all programs that fit the chip at once have about as many
    blocks   rows with many: their queries, a tile each

        keys    r0 ========   r1 ==   r2 ===================    ──►    r0 ====  r0 ====  r1 ==  r2 =====  r2 =====  ...

Refuses to know: heads, layers, what is read.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "bound", "fit", "least", "shortest", "longest"])
def list_pieces_kernel(
    positions, query_start, kv_len, row_begin, items, rows, bound, fit, least, shortest, longest,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, HAS_PREFIX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """items [bound, 8]: (row, piece, pieces, first query, queries, first key, behind the last, keys that every query
    sees) of every piece of the rows with shortest .. longest queries; row -1 behind them. Pieces fill whole rounds of
    `fit`, a quarter more of them than rows at least; rows of up to `least` tiles of keys are not cut. One program a
    row."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    every = tl.arange(0, ROWS)
    there = every < rows
    queries = tl.load(query_start + every + 1, mask=there, other=0) - tl.load(query_start + every, mask=there, other=0)
    there &= (queries >= shortest) & (queries <= longest)
    keys = tl.load(kv_len + every, mask=there, other=0)
    if HAS_PREFIX:
        keys -= tl.load(row_begin + every, mask=there, other=0)
    if WINDOW:
        keys = tl.minimum(keys, WINDOW + BLOCK_N)
    some = keys > 1  # what pads captured steps of single tokens is not: it must not change how the rest is cut
    tiles = tl.where(some, tl.cdiv(keys, BLOCK_N), 0)
    wanted = tl.cdiv(tl.sum(some.to(tl.int32), 0) * 5, fit * 4) * fit
    wanted = tl.minimum(wanted, bound - tl.sum((there & (keys <= 1)).to(tl.int32), 0))
    size, most = least, tl.maximum(tl.max(tiles, 0), least)  # tiles of a piece, at most
    while size < most:
        middle = (size + most) // 2
        if tl.sum(tl.cdiv(tiles, middle), 0) <= wanted:
            most = middle
        else:
            size = middle + 1
    pieces = tl.where(there, tl.maximum(tl.cdiv(tiles, size), 1), 0)
    before = tl.sum(tl.where(every < row, pieces, 0), 0)
    own = tl.sum(tl.where(every == row, pieces, 0), 0)

    first_query = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first_query
    q = tl.arange(0, QUERIES)
    at = tl.load(positions + first_query + q, mask=(q < count) & (own > 0), other=-1).to(tl.int32)
    end = tl.minimum(tl.load(kv_len + row), tl.max(at, 0) + 1)
    full = tl.minimum(tl.min(tl.where(at < 0, 2147483647, at), 0) + 1, end)
    start = 0
    if HAS_PREFIX:
        start = tl.load(row_begin + row)
    if WINDOW:
        start = tl.maximum(full - WINDOW, 0) // BLOCK_N * BLOCK_N
    part = tl.cdiv(tl.cdiv(tl.maximum(end - start, 0), tl.maximum(own, 1)), BLOCK_N) * BLOCK_N
    for i0 in range(0, own, 64):
        i = i0 + tl.arange(0, 64)
        item = items + (before + i) * 8
        inside = i < own
        tl.store(item, row, mask=inside)
        tl.store(item + 1, i, mask=inside)
        tl.store(item + 2, own, mask=inside)
        tl.store(item + 3, first_query, mask=inside)
        tl.store(item + 4, count, mask=inside)
        tl.store(item + 5, start + i * part, mask=inside)
        tl.store(item + 6, tl.minimum(start + (i + 1) * part, end), mask=inside)
        tl.store(item + 7, full, mask=inside)
    if row == 0:
        for i0 in range(tl.sum(pieces, 0), bound, 64):
            i = i0 + tl.arange(0, 64)
            tl.store(items + i * 8, -1, mask=i < bound)


@triton.jit(do_not_specialize=["rows", "bound", "shortest", "longest"])
def list_blocks_kernel(
    query_start, items, rows, bound, shortest, longest,
    ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """items [bound, 2]: (row, tile) of every block of the rows with shortest .. longest tokens, last rows and tiles
    first (they have the most keys); (-1, -1) behind them. One program a row."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    every = tl.arange(0, ROWS)
    there = every < rows
    tokens = tl.load(query_start + every + 1, mask=there, other=0) - tl.load(query_start + every, mask=there, other=0)
    blocks = tl.where((tokens >= shortest) & (tokens <= longest), tl.cdiv(tokens, BLOCK_Q), 0)
    behind = tl.sum(tl.where(every > row, blocks, 0), 0)
    own = tl.sum(tl.where(every == row, blocks, 0), 0)
    for i0 in range(0, own, 128):
        i = i0 + tl.arange(0, 128)
        tl.store(items + (behind + i) * 2, row, mask=i < own)
        tl.store(items + (behind + i) * 2 + 1, own - 1 - i, mask=i < own)
    if row == 0:
        for i0 in range(behind + own, bound, 128):
            i = i0 + tl.arange(0, 128)
            tl.store(items + i * 2, -1, mask=i < bound)
            tl.store(items + i * 2 + 1, -1, mask=i < bound)
