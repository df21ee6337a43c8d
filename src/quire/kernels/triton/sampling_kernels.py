# mypy: allow-untyped-defs, allow-incomplete-defs
"""What kernels over logits share: noise, the order of likelihood, the first tokens in it; and the most likely token.

The noise is that of `generation/noise.py`, uniforms equal to the bit. Plain twins: that, `generation.top_k`, torch's
argmax. Refuses to know: slots, parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import counters, overlap, power_of_two, processors

CHUNK = 2048  # tokens that are looked at together
PROGRAMS = 8  # that share the chunks of all rows, for each processor
RUN = 64  # tokens whose maximum tells whether any of them can be among the first k
CANDIDATES = 2048  # for them that are looked at together
_LOWEST = tl.constexpr(-2147483648)
_RULED_OUT = tl.constexpr(-2139095041)  # the place of minus infinity


@dataclass(frozen=True)
class Chunks:
    """How the vocabulary is cut, and how many programs share a row's chunks."""

    block: int
    chunks: int
    programs: int

    @property
    def runs(self) -> int:
        return self.chunks * self.block // RUN

    @staticmethod
    def of(rows: int, vocab: int, device: torch.device) -> Chunks:
        block = min(CHUNK, max(RUN, power_of_two(vocab)))
        chunks = -(-vocab // block)
        return Chunks(block, chunks, max(1, min(chunks, PROGRAMS * processors(device) // rows)))


@triton.jit
def row_keys(stream, position):
    """Of a drawn position, as `noise.row_keys` makes them: two words of 32 bits."""
    x = stream.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def uniform(key0, key1, ids):
    """Uniforms in (0, 1), as `noise.uniform` makes them."""
    x = ids.to(tl.uint32) * 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    x = (x ^ key0) * 0x7FEB352D
    x = (x ^ (x >> 15) ^ key1) * 0x846CA68B
    signed = x.to(tl.int32, bitcast=True)
    return ((signed >> 16) ^ signed).to(tl.float32) + 0.5


@triton.jit
def _log(x, APPROX: tl.constexpr):
    """APPROX: by the chip's own logarithm, which is within 2^-22 of it, absolutely near 1 and relatively elsewhere."""
    if APPROX:
        log2 = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
        return log2 * 0.6931471805599453
    return tl.log(x)


@triton.jit
def gumbel(key0, key1, ids, APPROX: tl.constexpr):
    u = uniform(key0, key1, ids) * 4.656612317858205e-10  # 2^-31 * (1 - 2^-23)
    # -log1p(-u), by its series where 1 - u would lose digits
    series = tl.fma(u, 0.125, 0.14285714285714285)
    series = tl.fma(series, u, 0.16666666666666666)
    series = tl.fma(series, u, 0.2)
    series = tl.fma(series, u, 0.25)
    series = tl.fma(series, u, 0.3333333333333333)
    series = tl.fma(series, u, 0.5)
    series = tl.fma(series * u, u, u)
    return -_log(tl.where(u < 0.125, series, -_log(1.0 - u, APPROX)), APPROX)


@triton.jit
def order(x):
    """Integers that order as the logits do; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_logits(row_ptr, ids, inside):
    return tl.load(row_ptr + ids, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def kth(places, inside, k, low, high):
    """The k-th largest of those inside, known to lie between; `low`, if there are fewer. Three cuts at a time are
    counted in one sum."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        step = (high - low + 3) >> 2
        cut1, cut2 = low + step, tl.minimum(low + 2 * step, high + 1)
        cut3 = tl.minimum(low + 3 * step, high + 1)
        counts = (inside & (places >= cut1.to(tl.int32))).to(tl.int64)
        counts += (inside & (places >= cut2.to(tl.int32))).to(tl.int64) << 20
        counts += (inside & (places >= cut3.to(tl.int32))).to(tl.int64) << 40
        count = tl.sum(counts, 0)
        if (count >> 40) >= k:
            low = cut3
        elif ((count >> 20) & 0xFFFFF) >= k:
            low, high = cut2, cut3 - 1
        elif (count & 0xFFFFF) >= k:
            low, high = cut1, cut2 - 1
        else:
            high = cut1 - 1
    return low.to(tl.int32)


@triton.jit
def first_tokens(row_ptr, maxima, runs_ptr, found_ptr, k, top_place, vocab, RUN: tl.constexpr, RUNS: tl.constexpr,
            MOST: tl.constexpr):  # fmt: skip
    """The ids, ascending, of all tokens that may be among the first k, how many these are, and a place none lies below:
    they are in the runs with the k largest maxima. MOST and more: too many to look at together. Tokens that are ruled
    out are left out, so that there may be fewer than k."""
    r = tl.arange(0, RUNS)
    size = (vocab + RUN - 1) // RUN
    places = order(tl.load(maxima + r, mask=r < size, other=float("-inf")))
    count = tl.full([], MOST, tl.int32)
    least = tl.full([], _LOWEST, tl.int32)
    if k <= tl.minimum(size, MOST):
        least = tl.maximum(kth(places, r < size, k, tl.min(places, 0), top_place), _RULED_OUT + 1)
        chosen = (r < size) & (places >= least)
        tl.store(runs_ptr + tl.cumsum(chosen.to(tl.int32), 0) - 1, r, mask=chosen)
        many = tl.sum(chosen.to(tl.int32), 0)
        tl.debug_barrier()
        count = tl.full([], 0, tl.int32)
        for first in range(0, many, MOST // RUN):
            at = first + tl.arange(0, MOST // RUN)
            runs = tl.load(runs_ptr + at, mask=at < many, other=0)
            ids = tl.reshape(runs[:, None] * RUN + tl.arange(0, RUN)[None, :], [MOST])
            real = tl.reshape((at < many)[:, None] & (tl.arange(0, RUN) >= 0)[None, :], [MOST]) & (ids < vocab)
            hit = real & (order(load_logits(row_ptr, ids, real)) >= least)
            to = count + tl.cumsum(hit.to(tl.int32), 0) - 1
            tl.store(found_ptr + to, ids, mask=hit & (to < MOST))
            count += tl.sum(hit.to(tl.int32), 0)
        tl.debug_barrier()
    return count, least


@triton.jit(do_not_specialize=["vocab"])
def argmax_kernel(
    logits, best_value, best_id, counters_ptr, out, vocab, stride,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row by chunk; the last chunk of a row takes the best of all."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size = tl.num_programs(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
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


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row; lower ids win ties. [n, vocab] → int64 [n]"""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    block = min(2 * CHUNK, power_of_two(vocab))
    chunks = -(-vocab // block)
    values = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    argmax_kernel[(rows, chunks)](
        logits, values, ids, counters(logits.device, rows), out, vocab, logits.stride(0),
        CHUNKS=power_of_two(chunks), BLOCK=block, num_warps=4, **overlap(logits.device),
    )  # fmt: skip
    return out
