# mypy: allow-untyped-defs, allow-incomplete-defs
"""Drawing tokens without sorting: argmax, with noise or without, over all tokens or those that truncation keeps.

In the order of likelihood (larger logit first, lower id first among equals) min-p, top-k and top-p each keep a prefix,
so together they are one cut: a logit, and how many of the tokens equal to it still belong. The cut is searched for by
bisection over the logits' bits, which order as integers; every pass moves both ends of the bracket onto logits that
occur. The noise is that of `generation/noise.py`: uniforms equal to the bit.

    pass 1 ─ top, mass ─► bisect count < k ─► mass of those left ─► bisect mass < p ─► cut ─► last pass: argmax

Plain twins: `generation.draw` over `generation.order`. Refuses to know: slots, penalties, what was done to the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import counters, overlap, power_of_two

CHUNK = 4096  # tokens a program of the plain argmax looks at
_LOWEST = tl.constexpr(-2147483648)


@triton.jit
def uniform(key0, key1, ids):
    """Uniforms in (0, 1), as `noise.uniform` makes them."""
    x = ids.to(tl.uint32) * 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    x = (x ^ key0.to(tl.uint32, bitcast=True)) * 0x7FEB352D
    x = (x ^ (x >> 15) ^ key1.to(tl.uint32, bitcast=True)) * 0x846CA68B
    signed = x.to(tl.int32, bitcast=True)
    return ((signed >> 16) ^ signed).to(tl.float32) + 0.5


@triton.jit
def gumbel(key0, key1, ids):
    u = uniform(key0, key1, ids) * 4.656612317858205e-10  # 2^-31 * (1 - 2^-23)
    rest = 1.0 - u
    # log1p(-u) out of log: the quotient repairs what rounding 1 - u lost
    exponential = tl.where(rest == 1.0, u, -tl.log(rest) * (u / (1.0 - rest)))
    return -tl.log(exponential)


@triton.jit(do_not_specialize=["vocab"])
def argmax_kernel(
    logits, keys, temperature, best_value, best_id, counters_ptr, out, vocab, stride,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, NOISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row by chunk; the last chunk of a row takes the best of all. Colder than zero degrees is greedy."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size = tl.num_programs(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    if NOISE:
        heat = tl.load(temperature + row)
        if heat > 0.0:
            noise = gumbel(tl.load(keys + row * 2), tl.load(keys + row * 2 + 1), ids)
            x = tl.where(ids < vocab, noise * heat + x, float("-inf"))
    value, at = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_value + row * size + chunk, value)
    tl.store(best_id + row * size + chunk, chunk * BLOCK + at)
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + row, 1, sem="acq_rel") == size - 1:
        tl.store(counters_ptr + row, 0)
        c = tl.arange(0, CHUNKS)
        values = tl.load(best_value + row * size + c, mask=c < size, other=float("-inf"), cache_modifier=".cg")
        winner = tl.argmax(values, 0)
        found = tl.load(best_id + row * size + c, mask=c < size, other=0, cache_modifier=".cg")
        tl.store(out + row, tl.sum(tl.where(c == winner, found, 0), 0).to(tl.int64))


@triton.jit
def _order(x):
    """Integers that order as the logits do; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _above(row_ptr, at, top, heat, least, vocab, BLOCK: tl.constexpr):
    """Of tokens above `at` (and `least`): how many, their mass, the lowest; and the highest of the others."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    lowest = tl.full([BLOCK], 2147483647, tl.int32)
    highest = tl.full([BLOCK], _LOWEST, tl.int32)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        place = _order(x)
        allowed = (ids < vocab) & (place >= least)
        above = allowed & (place > at)
        count += above.to(tl.int32)
        mass += tl.where(above, tl.exp((x - top) / heat), 0.0).to(tl.float64)
        lowest = tl.minimum(lowest, tl.where(above, place, 2147483647))
        highest = tl.maximum(highest, tl.where(allowed & (place <= at), place, _LOWEST))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(lowest, 0), tl.max(highest, 0)


@triton.jit
def _search(row_ptr, top_place, most, limit, top, heat, least, vocab, BLOCK: tl.constexpr):
    """The lowest place whose tokens belong: fewer than `most` tokens lie above it, with less than `limit` of mass.
    Returns it with the count and mass above it."""
    # invariant: tokens at `high` belong, tokens at `low` do not (or there are none)
    high = top_place
    low = least.to(tl.int64) - 1
    count = 0
    mass = tl.sum(tl.zeros([1], tl.float64), 0)
    while high.to(tl.int64) - low > 1:
        middle = ((high.to(tl.int64) + low) >> 1).to(tl.int32)
        n, m, lowest, highest = _above(row_ptr, middle, top, heat, least, vocab, BLOCK)
        if (n < most) & (m < limit):
            # nothing between `highest` and `middle`: what holds for one holds for the other
            none = highest == _LOWEST
            high = tl.where(none, high, highest)
            low = tl.where(none, high.to(tl.int64) - 1, low)
            count = tl.where(none, count, n)
            mass = tl.where(none, mass, m)
        else:
            low = lowest.to(tl.int64) - 1
            low = tl.maximum(low, middle.to(tl.int64))
    return high, count, mass


@triton.jit(do_not_specialize=["vocab"])
def truncated_kernel(
    logits, keys, temperature, top_k, top_p, log_min_p, out, vocab, stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits + row * stride
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row).to(tl.int64)
    p = tl.load(top_p + row).to(tl.float64)
    floor = tl.load(log_min_p + row)
    key0, key1 = tl.load(keys + row * 2), tl.load(keys + row * 2 + 1)

    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32))
    top = tl.max(peak, 0)
    top_place = _order(top)

    # min-p: the lowest place it keeps; of a greedy row, the top alone
    least = tl.where(heat <= 0.0, top_place, tl.minimum(_order(top + heat * floor), top_place))

    cut = least
    ties = vocab.to(tl.int64)  # of the tokens at the cut, how many belong
    limitless = tl.sum(tl.zeros([1], tl.float64), 0) + float("inf")
    total = limitless
    if (k < vocab) & (heat > 0.0):
        cut, count, mass = _search(row_ptr, top_place, k, limitless, top, heat, least, vocab, BLOCK)
        ties = k - count
        here, below, _, _ = _above(row_ptr, cut - 1, top, heat, least, vocab, BLOCK)
        level = (here - count).to(tl.int64)
        ties = tl.minimum(ties, level)
        total = mass + (below - mass) * (ties.to(tl.float64) / level.to(tl.float64))
    if (p < 1.0) & (heat > 0.0):
        if total == float("inf"):
            _, total, _, _ = _above(row_ptr, least - 1, top, heat, least, vocab, BLOCK)
        limit = p * total
        lower, count, mass = _search(row_ptr, top_place, vocab + 1, limit, top, heat, cut, vocab, BLOCK)
        here, below, _, _ = _above(row_ptr, lower - 1, top, heat, cut, vocab, BLOCK)
        each = (below - mass) / (here - count).to(tl.float64)
        needed = tl.ceil((limit - mass) / tl.maximum(each, 1e-300)).to(tl.int64)
        needed = tl.maximum(needed, 1)
        ties = tl.where(lower > cut, needed, tl.minimum(ties, needed))
        cut = lower

    value = tl.full([BLOCK], float("-inf"), tl.float32)
    winner = tl.full([BLOCK], 2147483647, tl.int32)
    seen = tl.zeros([1], tl.int64)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        place = _order(x)
        level = ((place == cut) & (ids < vocab)).to(tl.int64)
        before = seen + tl.cumsum(level, 0) - level
        keep = (ids < vocab) & ((place > cut) | ((level > 0) & (before < ties)))
        if heat > 0.0:
            x = gumbel(key0, key1, ids) * heat + x
        x = tl.where(keep, x, float("-inf"))
        winner = tl.where((x > value) | ((x == value) & (winner == 2147483647) & keep), ids, winner)
        value = tl.maximum(value, x)
        seen += tl.sum(level, 0)
    best = tl.max(value, 0)
    tl.store(out + row, tl.min(tl.where(value == best, winner, 2147483647), 0).to(tl.int64))


def argmax(
    logits: torch.Tensor,  # [n, vocab]
    keys: torch.Tensor | None = None,  # int32 [n, 2], from `noise.row_keys`; None: no noise
    temperature: torch.Tensor | None = None,  # float32 [n], with keys; zero: greedy
) -> torch.Tensor:  # int64 [n]
    """The most likely token of each row, or a draw from softmax(logits / temperature). Lower ids win ties."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    block = min(CHUNK, power_of_two(vocab))
    chunks = -(-vocab // block)
    values = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    noisy = keys is not None
    argmax_kernel[(rows, chunks)](
        logits, keys if keys is not None else ids, values if temperature is None else temperature, values, ids,
        counters(logits.device, rows), out, vocab, logits.stride(0),
        CHUNKS=power_of_two(chunks), BLOCK=block, NOISE=noisy, num_warps=4, enable_fp_fusion=False,
        **overlap(logits.device),
    )  # fmt: skip
    return out


def draw(
    logits: torch.Tensor,  # [n, vocab]
    keys: torch.Tensor,  # int32 [n, 2], from `noise.row_keys`
    temperature: torch.Tensor,  # float32 [n]; zero: greedy
    top_k: torch.Tensor,  # int64 [n]; the vocabulary where off
    top_p: torch.Tensor,  # float64 [n]; one or more where off
    log_min_p: torch.Tensor,  # float32 [n]; -inf where off
) -> torch.Tensor:  # int64 [n]
    """One token a row from what min-p, top-k and top-p leave, in this order. The top token always stays."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        truncated_kernel[(rows,)](
            logits, keys, temperature, top_k, top_p, log_min_p, out, vocab, logits.stride(0),
            BLOCK=min(4096, power_of_two(vocab)), num_warps=16, enable_fp_fusion=False, **overlap(logits.device),
        )  # fmt: skip
    return out
