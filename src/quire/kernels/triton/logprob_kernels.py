# mypy: allow-untyped-defs, allow-incomplete-defs
"""Log-probabilities of given tokens, their ranks, and the likeliest tokens, without an array of all probabilities.

Plain twin: `generation.logprobs`. Refuses to know: how a token was drawn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import counters, overlap, power_of_two
from quire.kernels.triton.sampling_kernels import CANDIDATES, RUN, Chunks, first_tokens, load_logits, order

_LOWEST = tl.constexpr(-2147483648)
_HIGHEST = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["vocab", "size", "stride", "k"])
def logprob_kernel(
    logits, targets, partial, above, maxima, tops, masses, found, counters_ptr, vocab, stride, size, k,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row's chunks are shared out. `maxima`: of runs."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, part, programs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row_ptr = logits + row * stride
    chosen = tl.load(row_ptr + tl.load(targets + row)).to(tl.float32)
    for chunk in range(part, size, programs):
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        x = load_logits(row_ptr, ids, ids < vocab)
        runs = chunk * (BLOCK // RUN) + tl.arange(0, BLOCK // RUN)
        tl.store(maxima + row * size * (BLOCK // RUN) + runs, tl.max(tl.reshape(x, [BLOCK // RUN, RUN]), 1))
        top = tl.max(x, 0)
        base = tl.where(top == float("-inf"), 0.0, top)
        at = row * size + chunk
        tl.store(partial + at * 2, top)
        tl.store(partial + at * 2 + 1, tl.sum(tl.exp(x - base), 0))
        tl.store(above + at, tl.sum((x > chosen).to(tl.int32), 0))
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + row, 1, sem="acq_rel") == programs - 1:
        tl.store(counters_ptr + row, 0)
        c = tl.arange(0, CHUNKS)
        at = row * size + c
        parts = tl.load(partial + at * 2, mask=c < size, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(partial + at * 2 + 1, mask=c < size, other=0.0, cache_modifier=".cg")
        top = tl.max(parts, 0)
        mass = tl.log(tl.sum(tl.where(sums > 0.0, sums * tl.exp(parts - top), 0.0), 0))
        rank = tl.sum(tl.load(above + at, mask=c < size, other=0, cache_modifier=".cg"), 0) + 1
        tl.store(tops + row, top)
        tl.store(masses + row, mass)
        tl.store(found + row * (2 + 2 * k), ((chosen - top) - mass).to(tl.int32, bitcast=True))
        tl.store(found + row * (2 + 2 * k) + 1, rank)


@triton.jit(do_not_specialize=["vocab", "size", "stride", "k"])
def likeliest_kernel(
    logits, maxima, tops, masses, lists, found, vocab, stride, size, k,
    BLOCK: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first k in the order of likelihood, one after the other."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    row_ptr, top, mass = logits + row * stride, tl.load(tops + row), tl.load(masses + row)
    list_ptr = lists + row * (RUNS + MOST)
    count, _ = first_tokens(row_ptr, maxima + row * size * (BLOCK // RUN), list_ptr, list_ptr + RUNS, k.to(tl.int64),
                            order(top), vocab, RUN, RUNS, MOST)  # fmt: skip
    few = (count < MOST) & (count >= k)
    count = tl.where(few, count, 0)
    c = tl.arange(0, MOST)
    ids = tl.load(list_ptr + RUNS + c, mask=c < count, other=0)
    place = order(load_logits(row_ptr, ids, c < count))
    last_place, last = tl.full([], _HIGHEST, tl.int32), tl.full([], -1, tl.int32)
    for j in range(0, k):
        best, winner = tl.full([], _LOWEST, tl.int32), tl.full([], _HIGHEST, tl.int32)
        if few:
            behind = (c < count) & ((place < last_place) | ((place == last_place) & (ids > last)))
            best = tl.max(tl.where(behind, place, _LOWEST), 0)
            winner = tl.min(tl.where(behind & (place == best), ids, _HIGHEST), 0)
        else:
            for first in range(0, vocab, MOST):
                every = first + c
                places = order(load_logits(row_ptr, every, every < vocab))
                behind = (places < last_place) | ((places == last_place) & (every > last))
                behind &= every < vocab
                value = tl.max(tl.where(behind, places, _LOWEST), 0)
                own = tl.min(tl.where(behind & (places == value), every, _HIGHEST), 0)
                winner = tl.where(value > best, own, winner)
                best = tl.maximum(best, value)
        last_place, last = best, winner
        logprob = (tl.load(row_ptr + winner).to(tl.float32) - top) - mass
        tl.store(found + row * (2 + 2 * k) + 2 + j, winner)
        tl.store(found + row * (2 + 2 * k) + 2 + k + j, logprob.to(tl.int32, bitcast=True))


def logprobs(
    logits: torch.Tensor,  # [n, vocab]
    targets: torch.Tensor,  # int64 [n]
    width: int,  # how many of the likeliest
) -> torch.Tensor:
    """int32 [n, 2 + 2 * width], so that one copy takes all: of the target its log-probability, a float32 by its bits,
    and rank; ids of the likeliest, most likely first; their log-probabilities."""
    rows, vocab = logits.shape
    device = logits.device
    assert logits.stride(1) == 1 and targets.is_contiguous()
    found = torch.empty(rows, 2 + 2 * width, dtype=torch.int32, device=device)
    if not rows:
        return found
    cut = Chunks.of(rows, vocab, device)
    chunks, runs = cut.chunks, cut.runs
    partial = torch.empty(rows, chunks, 2, device=device)
    above = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    maxima = torch.empty(rows, runs, device=device)
    tops, masses = torch.empty(rows, device=device), torch.empty(rows, device=device)
    common = {"BLOCK": cut.block, "RUN": RUN, **overlap(device)}
    logprob_kernel[(rows, cut.programs)](
        logits, targets, partial, above, maxima, tops, masses, found, counters(device, rows), vocab,
        logits.stride(0), chunks, width, CHUNKS=power_of_two(chunks), num_warps=4, **common,
    )  # fmt: skip
    if width:
        lists = torch.empty(rows, power_of_two(runs) + CANDIDATES, dtype=torch.int32, device=device)
        likeliest_kernel[(rows,)](
            logits, maxima, tops, masses, lists, found, vocab, logits.stride(0), chunks, width,
            RUNS=power_of_two(runs), MOST=CANDIDATES, num_warps=16, **common,
        )  # fmt: skip
    return found
