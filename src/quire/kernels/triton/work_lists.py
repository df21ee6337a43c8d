# mypy: allow-untyped-defs, allow-incomplete-defs
"""What the programs of an attention launch take on, listed on the device once a step for all layers.

A row's queries are a block, or several where it has many; the keys of each are cut into pieces, so that all programs
that fit the chip at once have about as many.

        keys    r0 ========   r1 ==   r2 ===================    ──►    r0 ====  r0 ====  r2 =====  r2 =====  ...  r1 ==

Refuses to know: heads, layers, what is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

ADDING = tl.constexpr(6)  # tiles of keys that take as long as adding up one piece's result


@triton.jit
def _tiles_a_piece(blocks, tiles, some, bound, fit, least, spare, TRIES: tl.constexpr):
    """Tiles of keys that a piece has at most, `least` or more, where rows have so many blocks and tiles. Pieces fill
    whole rounds of `fit`, at most `spare` more of them than blocks: as few rounds as give a quarter more pieces than
    blocks, or, of TRIES numbers of rounds, the one that takes the least time. Rows that are not `some` stay whole."""
    whole = tl.sum(tl.where(some, blocks, 0), 0)
    room = tl.minimum(whole + spare, bound - tl.sum(tl.where(some, 0, blocks), 0))
    longest = tl.maximum(tl.max(tiles, 0), least)
    if TRIES == 1:
        rounds = tl.cdiv(whole * 5, fit * 4)
    else:
        rounds = tl.cdiv(whole, fit)
    size, soonest = least, 2147483647
    for more in range(0, TRIES):
        few, most = least, longest
        while few < most:
            middle = (few + most) // 2
            if tl.sum(blocks * tl.cdiv(tiles, middle), 0) <= tl.minimum((rounds + more) * fit, room):
                most = middle
            else:
                few = middle + 1
        takes = (rounds + more) * few + ADDING * tl.cdiv(longest, few)
        if takes < soonest:
            soonest, size = takes, few
    return size


@triton.jit(do_not_specialize=["rows", "bound", "fit", "least", "spare", "shortest", "longest", "block_q", "block_n"])
def list_pieces_kernel(
    positions, query_start, kv_len, row_begin, items,
    rows, bound, fit, least, spare, shortest, longest, block_q, block_n,
    ROWS: tl.constexpr, WINDOW: tl.constexpr, HAS_PREFIX: tl.constexpr, STEADY: tl.constexpr,
    TRIES: tl.constexpr, BLOCKS: tl.constexpr, PIECES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """items [bound, 8]: (row, piece, pieces, first query, queries, first key, behind the last, keys that every query
    sees) of every piece of the rows with shortest .. longest queries, those of rows that are cut first, a row's last
    queries before its others (they have the most keys); row -1 elsewhere. STEADY: rows are cut after every `least`
    tiles of keys, whatever else there is. One program a row, which writes BLOCKS times PIECES at once."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    every = tl.arange(0, ROWS)
    there = every < rows
    queries = tl.load(query_start + every + 1, mask=there, other=0) - tl.load(query_start + every, mask=there, other=0)
    there &= (queries >= shortest) & (queries <= longest)
    blocks = tl.where(there, tl.cdiv(queries, block_q), 0)
    keys = tl.load(kv_len + every, mask=there, other=0)
    if HAS_PREFIX:
        keys -= tl.load(row_begin + every, mask=there, other=0)
    if WINDOW:
        keys = tl.minimum(keys, WINDOW + block_q + block_n)
    some = keys > 1  # what pads captured steps of single tokens is not: it must not change how the rest is cut
    tiles = tl.where(some, tl.cdiv(keys, block_n), 0)
    size = least
    if not STEADY:
        size = _tiles_a_piece(blocks, tiles, some, bound, fit, least, spare, TRIES)
    cuts = tl.maximum(tl.cdiv(tiles, size), 1)
    own = tl.sum(tl.where(every == row, cuts, 0), 0)
    pieces = blocks * cuts
    before = tl.sum(tl.where((every < row) & ((cuts > 1) == (own > 1)), pieces, 0), 0)
    if own == 1:
        before += tl.sum(tl.where(cuts > 1, pieces, 0), 0)

    first_query = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first_query
    last_key = tl.load(kv_len + row)
    number = tl.sum(tl.where(every == row, blocks, 0), 0)
    for b0 in range(0, number, BLOCKS):
        b = b0 + tl.arange(0, BLOCKS)
        mine = b < number
        begin = (number - 1 - b) * block_q
        held = tl.minimum(count - begin, block_q)  # queries
        at = positions + first_query + begin
        end = tl.minimum(tl.load(at + held - 1, mask=mine, other=0).to(tl.int32) + 1, last_key)
        full = tl.minimum(tl.load(at, mask=mine, other=0).to(tl.int32) + 1, end)
        start = tl.zeros([BLOCKS], tl.int32)
        if HAS_PREFIX:
            start += tl.load(row_begin + row)
        if WINDOW:
            start = tl.maximum(full - WINDOW, 0) // block_n * block_n
        seen = tl.maximum(end - start, 0)
        parts = tl.minimum(tl.maximum(tl.cdiv(seen, size * block_n), 1), own)
        part = tl.cdiv(tl.cdiv(seen, parts), block_n) * block_n
        if STEADY:
            part = tl.zeros([BLOCKS], tl.int32) + size * block_n
        for p0 in range(0, own, PIECES):
            p = p0 + tl.arange(0, PIECES)[None, :]
            item = items + (before + b[:, None] * own + p) * 8
            inside = mine[:, None] & (p < own)
            tl.store(item, tl.where(p < parts[:, None], row, -1), mask=inside)
            inside &= p < parts[:, None]
            tl.store(item + 1, p, mask=inside)
            tl.store(item + 2, parts[:, None], mask=inside)
            tl.store(item + 3, (first_query + begin)[:, None], mask=inside)
            tl.store(item + 4, held[:, None], mask=inside)
            tl.store(item + 5, start[:, None] + p * part[:, None], mask=inside)
            tl.store(item + 6, tl.minimum(start[:, None] + (p + 1) * part[:, None], end[:, None]), mask=inside)
            tl.store(item + 7, full[:, None], mask=inside)
    if row == 0:
        for i0 in range(tl.sum(pieces, 0), bound, 64):
            i = i0 + tl.arange(0, 64)
            tl.store(items + i * 8, -1, mask=i < bound)
