# mypy: allow-untyped-defs, allow-incomplete-defs
"""What is done to logits before a draw: bias, tokens that must not come yet, penalties, and masks; in place.

Penalties need to know how often each token of a row's history occurs there. A program counts in memory of its own, as
large as the vocabulary, takes every count out again as it uses it, and so leaves zeros for the next.

Plain twins: `generation.logit_processors`. Refuses to know: why a row asks for any of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import overlap

BIAS, STOPS, PENALTIES = 1, 2, 4  # what a row asks for
PROGRAMS = 64  # that count, each in memory of its own
TILE = 1024
MIN_ALLOWED = tl.constexpr(-1e30)  # of a token that a mask allows, whatever else forbids it
WORDS = tl.constexpr(11)  # of a slot's numbers, as `generation/sampling/slot_params.py` keeps them


@triton.jit(do_not_specialize=["rows", "stride", "biases", "stops", "length", "vocab"])
def adjust_kernel(
    logits, asked, numbers, bias_ids, bias_values, stop_ids, tokens, counts, rows, stride, biases, stops, length, vocab,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """asked [4, rows]: index into the logits, slot, position, what for."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    own = counts + tl.program_id(0).to(tl.int64) * vocab
    at = tl.arange(0, TILE)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        row_ptr = logits + tl.load(asked + row) * stride
        slot, position = tl.load(asked + rows + row), tl.load(asked + 2 * rows + row).to(tl.int32)
        what = tl.load(asked + 3 * rows + row)
        if (what & 1) != 0:
            for first in range(0, biases, TILE):
                inside = first + at < biases
                ids = tl.load(bias_ids + slot * biases + first + at, mask=inside, other=0)
                value = tl.load(bias_values + slot * biases + first + at, mask=inside, other=0.0)
                inside &= value != 0.0  # or padding
                tl.store(row_ptr + ids, tl.load(row_ptr + ids, mask=inside, other=0.0) + value, mask=inside)
            tl.debug_barrier()
        if (what & 2) != 0:
            for first in range(0, stops, TILE):
                ids = tl.load(stop_ids + slot * stops + first + at, mask=first + at < stops, other=-1)
                tl.store(row_ptr + ids, float("-inf"), mask=ids >= 0)
            tl.debug_barrier()
        if (what & 4) != 0:
            history, parameters = tokens + slot * length, numbers + slot * WORDS
            produced = tl.load(parameters + 3).to(tl.int32)  # from there on: what is before was the prompt
            repetition = tl.load(parameters + 8).to(tl.float64, bitcast=True).to(tl.float32)
            presence = tl.load(parameters + 9).to(tl.float64, bitcast=True).to(tl.float32)
            frequency = tl.load(parameters + 10).to(tl.float64, bitcast=True).to(tl.float32)
            for first in range(0, position, TILE):
                token = tl.load(history + first + at, mask=first + at < position, other=0)
                new = first + at >= produced
                tl.atomic_add(own + token, 2, mask=(first + at < position) & new, sem="relaxed")
                tl.atomic_or(own + token, 1, mask=(first + at < position) & (new == 0), sem="relaxed")
            tl.debug_barrier()
            for first in range(0, position, TILE):
                token = tl.load(history + first + at, mask=first + at < position, other=0)
                count = tl.atomic_xchg(own + token, 0, mask=first + at < position, sem="relaxed")
                count = tl.where(first + at < position, count, 0)  # zero: another has taken it
                x = tl.load(row_ptr + token, mask=count != 0, other=0.0)
                x = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
                x = x - frequency * (count >> 1).to(tl.float32) - presence * (count > 1).to(tl.float32)
                tl.store(row_ptr + token, x, mask=count != 0)
            tl.debug_barrier()


@triton.jit(do_not_specialize=["stride", "bytes_", "vocab"], do_not_specialize_on_alignment=["index"])
def mask_kernel(logits, index, masks, stride, bytes_, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(index + row)
    if target < 0:
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + target * stride + ids
    word = tl.load(masks + row * bytes_ + (ids >> 3), mask=ids < vocab, other=0).to(tl.int32)
    x = tl.load(at, mask=ids < vocab, other=0.0)
    tl.store(at, tl.where((word >> (ids & 7)) & 1 != 0, tl.maximum(x, MIN_ALLOWED), float("-inf")), mask=ids < vocab)


def counting_memory(vocab: int, device: torch.device) -> torch.Tensor:
    """For `adjust`: zeros between its launches."""
    return torch.zeros(PROGRAMS, vocab, dtype=torch.int32, device=device)


def adjust(
    logits: torch.Tensor,  # float32 [n, vocab]
    asked: torch.Tensor,  # int64 [4, m]: index into the logits, slot, position, sum of BIAS, STOPS, PENALTIES
    numbers: torch.Tensor,  # int64 [slots, 11]: parameters, floats as their bits
    bias_ids: torch.Tensor,  # int64 [slots, b]
    bias_values: torch.Tensor,  # float32 [slots, b]; zero: padding
    stop_ids: torch.Tensor,  # int64 [slots, s]; negative: padding
    tokens: torch.Tensor,  # int32 [slots, length]
    counts: torch.Tensor,  # from `counting_memory`
) -> None:
    rows = asked.shape[1]
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and asked.is_contiguous() and counts.is_contiguous()
    adjust_kernel[(min(rows, PROGRAMS),)](
        logits, asked, numbers, bias_ids, bias_values, stop_ids, tokens, counts, rows, logits.stride(0),
        bias_ids.shape[1], stop_ids.shape[1], tokens.stride(0), counts.shape[1],
        TILE=TILE, num_warps=8, enable_fp_fusion=False, **overlap(logits.device),
    )  # fmt: skip


def mask(logits: torch.Tensor, index: torch.Tensor, masks: torch.Tensor) -> None:
    """Forbid in rows all tokens but those whose bit is set. index int64 [m], negative: no row; masks uint8 [m, b]"""
    vocab, block = logits.shape[1], 4096
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and masks.is_contiguous()
    mask_kernel[(len(masks), -(-vocab // block))](
        logits, index, masks, logits.stride(0), masks.shape[1], vocab, BLOCK=block, num_warps=4,
        **overlap(logits.device),
    )  # fmt: skip
