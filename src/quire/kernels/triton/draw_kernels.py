# mypy: allow-untyped-defs, allow-incomplete-defs
"""Drawing a token for each row, as its slot's parameters say, without sorting and without the host.

A draw is the best of logit + temperature * noise over the tokens that min-p, top-k and top-p keep. In the order of
likelihood (larger logit first, lower id first among equals) each keeps a prefix. So the best of all tokens is the
answer if it is kept, and if it is not, neither is any token behind it: the next best is looked for among those ahead.

    score_kernel    row by chunk   the best of each chunk and of all; greedy and untruncated rows are done
    verify_kernel   row by chunk   the mass ahead of it against top-p; most others are done, the rest have the next best
    finish_kernel   row            what is left; and rows with top-k, among the few tokens that can be in it

The noise is that of `generation/noise.py`: uniforms equal to the bit. Plain twins: `generation.gumbel_draw` over
`generation.top_k`. Refuses to know: penalties, grammars, what was done to the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import counters, overlap, power_of_two
from quire.kernels.triton.sampling_kernels import (
    CANDIDATES,
    RUN,
    Chunks,
    first_tokens,
    gumbel,
    kth,
    load_logits,
    order,
    row_keys,
)

TILE = 8192  # tokens that are looked at together where one program looks at all of a row
VERIFIED = 3  # times that a row's token is held against top-p by many programs, before one goes on alone
WORDS = tl.constexpr(11)  # of a slot's numbers, as `generation/sampling/slot_params.py` keeps them
_LOWEST = tl.constexpr(-2147483648)
_HIGHEST = tl.constexpr(2147483647)


@triton.jit
def _ahead(place, ids, than_place, than_id):
    """Whether tokens come before another in the order of likelihood."""
    return (place > than_place) | ((place == than_place) & (ids < than_id))


@triton.jit
def _limits(numbers, slot):
    """Temperature, top-k, top-p and the logarithm of min-p."""
    own = numbers + slot * WORDS
    p, heat = tl.load(own + 5).to(tl.float64, bitcast=True), tl.load(own + 6).to(tl.float64, bitcast=True)
    return heat.to(tl.float32), tl.load(own + 2), p, tl.load(own + 7).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _weight(x, inside, top, heat):
    return tl.where(inside, tl.exp((x - top) * (1.0 / heat)), 0.0)


@triton.jit
def _sums(weight, BLOCK: tl.constexpr):
    """Of eights that lie side by side, in double precision: conversions are slow."""
    return tl.sum(tl.reshape(weight, [BLOCK // 8, 8]), 1).to(tl.float64)


@triton.jit(do_not_specialize=["vocab", "size"], do_not_specialize_on_alignment=["slots", "positions"])
def score_kernel(
    logits, numbers, slots, positions, best_value, best_id, chunk_top, maxima, row_top, pending, counters_ptr, out,
    vocab, stride, size, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr, APPROX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A row's chunks are shared out. `pending`: rows whose best token of all, in `out`, may not be kept. `maxima`: of
    runs, for rows with top-k."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, programs = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    slot = tl.load(slots + row)
    heat, k, p, floor = _limits(numbers, slot)
    key0, key1 = row_keys(tl.load(numbers + slot * WORDS), tl.load(positions + row))
    for chunk in range(tl.program_id(1), size, programs):
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        x = load_logits(logits + row * stride, ids, ids < vocab)
        score = x
        if heat > 0.0:  # else greedy
            score = tl.where(ids < vocab, gumbel(key0, key1, ids, APPROX) * heat + x, float("-inf"))
            if k < vocab:
                runs = chunk * (BLOCK // RUN) + tl.arange(0, BLOCK // RUN)
                tl.store(maxima + row * size * (BLOCK // RUN) + runs, tl.max(tl.reshape(x, [BLOCK // RUN, RUN]), 1))
        value, at = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best_value + row * size + chunk, value)
        tl.store(best_id + row * size + chunk, chunk * BLOCK + at)
        if heat > 0.0:
            value = tl.max(x, 0)
        tl.store(chunk_top + row * size + chunk, value)
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + row, 1, sem="acq_rel") == programs - 1:
        tl.store(counters_ptr + row, 0)
        c = tl.arange(0, CHUNKS)
        values = tl.load(best_value + row * size + c, mask=c < size, other=float("-inf"), cache_modifier=".cg")
        found = tl.load(best_id + row * size + c, mask=c < size, other=0, cache_modifier=".cg")
        tops = tl.load(chunk_top + row * size + c, mask=c < size, other=float("-inf"), cache_modifier=".cg")
        winner, top = tl.sum(tl.where(c == tl.argmax(values, 0), found, 0), 0), tl.max(tops, 0)
        allowed = tl.load(logits + row * stride + winner).to(tl.float32) >= top + heat * floor
        tl.store(out + row, winner.to(tl.int64))
        tl.store(row_top + row, top)
        tl.store(pending + row, ((heat > 0.0) & ((k < vocab) | (p < 1.0) | (allowed == 0))).to(tl.int32))


@triton.jit
def _best_ahead(
    row_ptr, place_of, id_of, best_value, best_id, chunk_top, size, heat, key0, key1, vocab,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, APPROX: tl.constexpr,
):  # fmt: skip
    """The token with the best score of those ahead of one that there are, and its place. A chunk's best is known, and
    holds if it is ahead itself."""
    c = tl.arange(0, CHUNKS)
    values = tl.load(best_value + c, mask=c < size, other=float("-inf"))
    found = tl.load(best_id + c, mask=c < size, other=0)
    tops = order(tl.load(chunk_top + c, mask=c < size, other=float("-inf")))
    holds = (c < size) & _ahead(order(load_logits(row_ptr, found, c < size)), found, place_of, id_of)
    unknown = (c < size) & (holds == 0) & (tops >= place_of)
    best = tl.max(tl.where(holds, values, float("-inf")), 0)
    winner = tl.min(tl.where(holds & (values == best), found, _HIGHEST), 0)
    chunk = tl.min(tl.where(unknown, c, CHUNKS), 0)
    while chunk < CHUNKS:
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        x = load_logits(row_ptr, ids, ids < vocab)
        ahead = (ids < vocab) & _ahead(order(x), ids, place_of, id_of)
        score = tl.where(ahead, gumbel(key0, key1, ids, APPROX) * heat + x, float("-inf"))
        value = tl.max(score, 0)
        own = tl.min(tl.where(ahead & (score == value), ids, _HIGHEST), 0)
        winner = tl.where((value > best) | ((value == best) & (own < winner)), own, winner)
        best = tl.maximum(best, value)
        chunk = tl.min(tl.where(unknown & (c > chunk), c, CHUNKS), 0)
    winner = tl.minimum(winner, vocab - 1)  # if nothing is a number
    return winner, order(tl.load(row_ptr + winner).to(tl.float32))


@triton.jit(do_not_specialize=["vocab", "size"], do_not_specialize_on_alignment=["slots", "positions"])
def verify_kernel(
    logits, numbers, slots, positions, best_value, best_id, chunk_top, mass, totals, row_top, pending, counters_ptr,
    out, vocab, stride, size, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, APPROX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows with top-p whose token is kept are done; others stay pending with the next. `totals`: of the mass."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, part, programs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if tl.load(pending + row) == 0:
        return
    slot = tl.load(slots + row)
    heat, k, p, floor = _limits(numbers, slot)
    if (k < vocab) | (p >= 1.0):
        return
    row_ptr, top = logits + row * stride, tl.load(row_top + row)
    winner = tl.load(out + row).to(tl.int32)
    place_of = order(tl.load(row_ptr + winner).to(tl.float32))
    least = tl.minimum(order(top + heat * floor), order(top))
    ahead, whole = tl.zeros([BLOCK // 8], tl.float64), tl.zeros([BLOCK // 8], tl.float64)
    for chunk in range(part, size, programs):
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        x = load_logits(row_ptr, ids, ids < vocab)
        place = order(x)
        weight = _weight(x, (ids < vocab) & (place >= least), top, heat)
        whole += _sums(weight, BLOCK)
        ahead += _sums(tl.where(_ahead(place, ids, place_of, winner), weight, 0.0), BLOCK)
    at = mass + (row * programs + part) * 2
    tl.store(at, tl.sum(ahead, 0))
    tl.store(at + 1, tl.sum(whole, 0))
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + row, 1, sem="acq_rel") == programs - 1:
        tl.store(counters_ptr + row, 0)
        c = tl.arange(0, CHUNKS)
        parts = mass + (row * programs + c) * 2
        total = tl.sum(tl.load(parts + 1, mask=c < programs, other=0.0, cache_modifier=".cg"), 0)
        tl.store(totals + row, total)
        mass_ahead = tl.sum(tl.load(parts, mask=c < programs, other=0.0, cache_modifier=".cg"), 0)
        if (mass_ahead < p * total) | (mass_ahead == 0.0):
            tl.store(pending + row, 0)
        else:
            if place_of < least:
                place_of, winner = least, vocab
            key0, key1 = row_keys(tl.load(numbers + slot * WORDS), tl.load(positions + row))
            winner, _ = _best_ahead(row_ptr, place_of, winner, best_value + row * size, best_id + row * size,
                                    chunk_top + row * size, size, heat, key0, key1, vocab, CHUNKS, BLOCK,
                                    APPROX)  # fmt: skip
            tl.store(out + row, winner.to(tl.int64))


@triton.jit
def _draw_among(row_ptr, found_ptr, count, k, p, heat, floor, key0, key1, top, least, vocab, MOST: tl.constexpr,
                APPROX: tl.constexpr):  # fmt: skip
    """The draw from the first k of these tokens."""
    c = tl.arange(0, MOST)
    ids = tl.load(found_ptr + c, mask=c < count, other=0)
    x = load_logits(row_ptr, ids, c < count)
    place = order(x)
    border = kth(place, c < count, k, least, order(top))
    above, level = (c < count) & (place > border), ((c < count) & (place == border)).to(tl.int32)
    left = k - tl.sum(above.to(tl.int32), 0)
    kept = above | ((level > 0) & (tl.cumsum(level, 0) <= left))
    kept &= place >= tl.minimum(order(top + heat * floor), order(top))
    weight = _weight(x, kept, top, heat).to(tl.float64)
    limit = p * tl.sum(weight, 0)
    score = gumbel(key0, key1, ids, APPROX) * heat + x
    winner = tl.full([], -1, tl.int32)
    going = True
    while going:
        best = tl.max(tl.where(kept, score, float("-inf")), 0)
        winner = tl.min(tl.where(kept & (score == best), ids, _HIGHEST), 0)
        winner = tl.minimum(winner, vocab - 1)  # if nothing is a number
        place_of = order(tl.load(row_ptr + winner).to(tl.float32))
        kept &= _ahead(place, ids, place_of, winner)
        going = (tl.sum(kept.to(tl.int32), 0) > 0) & (tl.sum(tl.where(kept, weight, 0.0), 0) >= limit)
    return winner


@triton.jit
def _border(row_ptr, k, top_place, vocab, BLOCK: tl.constexpr):
    """What comes right behind the first k of all tokens: a place, and an id there."""
    low, high = tl.full([], _LOWEST, tl.int64), top_place.to(tl.int64)
    above = tl.full([], 0, tl.int64)
    while low < high:  # the k-th largest place lies between; `above` counts what is beyond `high`
        middle = (low + high + 1) >> 1
        counts = tl.zeros([BLOCK], tl.int32)
        for first in range(0, vocab, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            counts += ((ids < vocab) & (order(load_logits(row_ptr, ids, ids < vocab)) >= middle.to(tl.int32))).to(
                tl.int32
            )
        count = tl.sum(counts, 0).to(tl.int64)
        if count >= k:
            low = middle
        else:
            high = middle - 1
            above = count
    left = k - above
    seen = tl.full([], 0, tl.int64)
    behind = vocab
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        level = ((ids < vocab) & (order(load_logits(row_ptr, ids, ids < vocab)) == low.to(tl.int32))).to(tl.int64)
        rank = seen + tl.cumsum(level, 0)
        behind = tl.minimum(behind, tl.min(tl.where((level > 0) & (rank > left), ids, vocab), 0))
        seen += tl.sum(level, 0)
    return low.to(tl.int32), behind


@triton.jit
def _mass_ahead(row_ptr, place_of, id_of, top, heat, vocab, BLOCK: tl.constexpr):
    mass = tl.zeros([BLOCK // 8], tl.float64)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = load_logits(row_ptr, ids, ids < vocab)
        mass += _sums(_weight(x, (ids < vocab) & _ahead(order(x), ids, place_of, id_of), top, heat), BLOCK)
    return tl.sum(mass, 0)


@triton.jit(do_not_specialize=["vocab", "size"], do_not_specialize_on_alignment=["slots", "positions"])
def finish_kernel(
    logits, numbers, slots, positions, best_value, best_id, chunk_top, maxima, totals, row_top, pending, lists, out,
    vocab, stride, size, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr,
    MOST: tl.constexpr, TILE: tl.constexpr, APPROX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(pending + row) == 0:
        return
    slot = tl.load(slots + row)
    heat, k, p, floor = _limits(numbers, slot)
    key0, key1 = row_keys(tl.load(numbers + slot * WORDS), tl.load(positions + row))
    row_ptr, top = logits + row * stride, tl.load(row_top + row)
    least = tl.minimum(order(top + heat * floor), order(top))
    list_ptr = lists + row * (RUNS + MOST)
    values, ids, tops = best_value + row * size, best_id + row * size, chunk_top + row * size
    token = tl.load(out + row).to(tl.int32)
    place = order(tl.load(row_ptr + token).to(tl.float32))
    total = tl.load(totals + row)
    going = p < 1.0
    if k < vocab:
        count, lowest = first_tokens(row_ptr, maxima + row * size * (BLOCK // RUN), list_ptr, list_ptr + RUNS, k,
                                     order(top), vocab, RUN, RUNS, MOST)  # fmt: skip
        if count < MOST:
            token = _draw_among(row_ptr, list_ptr + RUNS, count, k, p, heat, floor, key0, key1, top, lowest, vocab,
                                MOST, APPROX)  # fmt: skip
            going = False
        else:
            place, token = _border(row_ptr, k, order(top), vocab, TILE)
            if place < least:
                place, token = least, vocab
            total = _mass_ahead(row_ptr, place, token, top, heat, vocab, TILE)
            token, place = _best_ahead(row_ptr, place, token, values, ids, tops, size, heat, key0, key1, vocab, CHUNKS,
                                       BLOCK, APPROX)  # fmt: skip
    else:
        if p >= 1.0:  # min-p alone
            token, place = _best_ahead(row_ptr, least, vocab, values, ids, tops, size, heat, key0, key1, vocab, CHUNKS,
                                       BLOCK, APPROX)  # fmt: skip
    while going:
        mass = _mass_ahead(row_ptr, place, token, top, heat, vocab, TILE)
        going = (mass >= p * total) & (mass > 0.0)
        if going:
            token, place = _best_ahead(row_ptr, place, token, values, ids, tops, size, heat, key0, key1, vocab, CHUNKS,
                                       BLOCK, APPROX)  # fmt: skip
    tl.store(out + row, token.to(tl.int64))


def draw(
    logits: torch.Tensor,  # [n, vocab]
    numbers: torch.Tensor,  # int64 [slots, 11]: each slot's parameters, floats as their bits; no temperature: greedy
    slots: torch.Tensor,  # int64 [n]
    positions: torch.Tensor,  # int64 [n]: index in its slot of each token to draw
) -> torch.Tensor:  # int64 [n]
    """One token a row from what min-p, top-k and top-p leave, in this order. The top token always stays."""
    rows, vocab = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return out
    assert logits.stride(1) == 1 and numbers.is_contiguous() and slots.stride(0) == 1 == positions.stride(0)
    cut = Chunks.of(rows, vocab, device)
    chunks, parts = cut.chunks, cut.programs
    values, tops = torch.empty(rows, chunks, device=device), torch.empty(rows, chunks, device=device)
    ids = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    maxima = torch.empty(rows, cut.runs, device=device)
    top = torch.empty(rows, device=device)
    pending = torch.empty(rows, dtype=torch.int32, device=device)
    mass = torch.empty(rows, parts, 2, dtype=torch.float64, device=device)
    total = torch.empty(rows, dtype=torch.float64, device=device)
    lists = torch.empty(rows, power_of_two(cut.runs) + CANDIDATES, dtype=torch.int32, device=device)
    count, width = counters(device, rows), logits.stride(0)
    approx = device.type == "cuda"
    common = {"CHUNKS": power_of_two(chunks), "BLOCK": cut.block, "APPROX": approx, "enable_fp_fusion": False,
              **overlap(device)}  # fmt: skip
    score_kernel[(rows, parts)](
        logits, numbers, slots, positions, values, ids, tops, maxima, top, pending, count, out, vocab, width, chunks,
        RUN=RUN, num_warps=4, **common,
    )  # fmt: skip
    for _ in range(VERIFIED):
        verify_kernel[(rows, parts)](
            logits, numbers, slots, positions, values, ids, tops, mass, total, top, pending, count, out, vocab, width,
            chunks, num_warps=4, **common,
        )  # fmt: skip
    finish_kernel[(rows,)](
        logits, numbers, slots, positions, values, ids, tops, maxima, total, top, pending, lists, out, vocab, width,
        chunks, RUNS=power_of_two(cut.runs), MOST=CANDIDATES, TILE=min(TILE, max(8, power_of_two(vocab))), num_warps=16,
        RUN=RUN, **common,
    )  # fmt: skip
    return out
