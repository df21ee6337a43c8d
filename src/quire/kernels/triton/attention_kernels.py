# mypy: allow-untyped-defs, allow-incomplete-defs
"""The attention kernel: a block of queries of one KV head walks a range of paged keys with an online softmax.

    block of queries, BLOCK_M:   token 0 · head 0..G-1 | token 1 · head 0..G-1 | ...     G query heads share a KV head

A block is some of a row's queries, or a run of members of a group of rows with one prefix (`cascade.py`). Several
programs may share its keys; the last to finish adds up (`launch.py`). Which block and keys of a row a program has is
listed on the device once a step (`lists.py`). Softmax runs in powers of two.

Refuses to know: plans, host lengths; every length is read on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.fp8_unpack import even, odd


@triton.jit
def _walk(
    acc, acc_odd, peak, mass, q, q_odd, at, k, v, k_scales, v_scales, table, begin, end, first, scale,
    stride_page, stride_slot, stride_scale_page, stride_scale_slot,
    PAGE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    PAIRS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Keys begin .. end. Not MASKED: whole tiles that every query sees. Keys before `first` are seen by none, and
    what lies there or behind `end` may be anything, NaN included."""
    d = tl.arange(0, DP)
    for n0 in range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        inside = (n >= first) & (n < end)
        natural = n.to(tl.uint32)  # takes fewer instructions to divide
        if MASKED:
            page = tl.load(table + natural // PAGE, mask=inside, other=0).to(tl.int64)
            there = inside[:, None] & (d < D)[None, :]
        else:
            page = tl.load(table + natural // PAGE).to(tl.int64)
            there = (n >= 0)[:, None] & (d < D)[None, :]
        slot = (natural % PAGE).to(tl.int32)
        where = (page * stride_page + slot * stride_slot)[:, None] + d[None, :]
        if SCALED:
            beside = page * stride_scale_page + slot * stride_scale_slot
            k_scale = tl.load(k_scales + beside, mask=inside, other=0.0).to(tl.float32)
            v_scale = tl.load(v_scales + beside, mask=inside, other=0.0)
        if MASKED or D != DP:
            keys = tl.load(k + where, mask=there, other=0.0)
        else:
            keys = tl.load(k + where)
        if PAIRS != "":
            scores = tl.dot(q, tl.trans(even(keys, PAIRS, NATIVE)))
            scores = tl.dot(q_odd, tl.trans(odd(keys, PAIRS, NATIVE)), scores)
        else:
            scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        scores *= scale
        if SCALED:
            scores *= k_scale[None, :]
        if SOFTCAP > 0.0:  # tanh as a sigmoid; `scale` has divided by the cap and left the powers of two to this
            scores = SOFTCAP - 2.0 * SOFTCAP / (tl.exp2(2.0 * scores) + 1.0)
        if MASKED:
            seen = (n[None, :] <= at[:, None]) & inside[None, :]
            if WINDOW:
                seen &= n[None, :] >= (at // WINDOW * WINDOW if CHUNKED else at - WINDOW + 1)[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        p = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(peak - level)
        mass = mass * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        if PAIRS != "":
            acc_odd = acc_odd * shrink[:, None]
        if MASKED or D != DP:
            values = tl.load(v + where, mask=there, other=0.0)
        else:
            values = tl.load(v + where)
        p = p.to(q.dtype)
        if PAIRS != "":
            some, others = even(values, PAIRS, NATIVE), odd(values, PAIRS, NATIVE)
            if SCALED:  # rather than the weights, which may be too small for half floats
                some *= v_scale[:, None]
                others *= v_scale[:, None]
            acc = tl.dot(p, some, acc)
            acc_odd = tl.dot(p, others, acc_odd)
        else:
            acc = tl.dot(p, values, acc, input_precision=PRECISION)
        peak = higher
    return acc, acc_odd, peak, mass


@triton.jit
def _join(out, lse, other, other_lse):
    """Two normalised results over different keys as one over all; log-sums are to base two."""
    top = tl.maximum(lse, other_lse)
    top = tl.where(top == float("-inf"), 0.0, top)
    mine, theirs = tl.exp2(lse - top), tl.exp2(other_lse - top)
    both = mine + theirs
    share = tl.where(both > 0.0, 1.0 / both, 0.0)
    return out * (mine * share)[:, None] + other * (theirs * share)[:, None], top + tl.log2(both)


@triton.jit
def _store(
    out_ptr, lse_ptr, prefix_out, prefix_lse, row_begin, out, lse, d, row, token, head, valid, stride_ot, stride_oh,
    heads, D: tl.constexpr, HAS_PREFIX: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Dimensions `d` of a block's result, [BLOCK_M, of them]."""
    where = valid[:, None] & (d < D)[None, :]
    flat = token.to(tl.int64) * heads + head
    if HAS_PREFIX:
        if tl.load(row_begin + row) > 0:
            other = tl.load(prefix_out + flat[:, None] * D + d[None, :], mask=where, other=0.0).to(tl.float32)
            other_lse = tl.load(prefix_lse + flat, mask=valid, other=float("-inf")) * 1.4426950408889634
            out, lse = _join(out, lse, other, other_lse)
    at = token.to(tl.int64) * stride_ot + head * stride_oh
    tl.store(out_ptr + at[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty), mask=where)
    if HAS_LSE:
        tl.store(lse_ptr + flat, lse * 0.6931471805599453, mask=valid)


@triton.jit
def _add_up(
    partial, partial_lse, rows, apart, used,
    out_ptr, lse_ptr, prefix_out, prefix_lse, row_begin, row, token, head, valid, stride_ot, stride_oh, heads,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, HAS_PREFIX: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """A block's parts, a few dimensions at a time: registers that this takes, the walk over the keys would lack."""
    WIDTH: tl.constexpr = min(DP, 4096 // BLOCK_M)
    for d0 in range(0, DP, WIDTH):
        d = d0 + tl.arange(0, WIDTH)
        out = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        lse = tl.full([BLOCK_M], float("-inf"), tl.float32)
        for s in range(0, used):
            at = rows + s * apart
            other = tl.load(partial + at[:, None] * DP + d[None, :], valid[:, None], 0.0, cache_modifier=".cg")
            other_lse = tl.load(partial_lse + at, valid, float("-inf"), cache_modifier=".cg")
            out, lse = _join(out, lse, other, other_lse)
        _store(out_ptr, lse_ptr, prefix_out, prefix_lse, row_begin, out, lse, d, row, token, head, valid, stride_ot,
               stride_oh, heads, D, HAS_PREFIX, HAS_LSE)  # fmt: skip


@triton.jit(do_not_specialize=["splits", "split_min", "stride_table"])
def attend_kernel(
    q_ptr, k_ptr, v_ptr, k_scales, v_scales, out_ptr, lse_ptr,  # lse: natural, [tokens, heads]
    prefix_out, prefix_lse, row_begin,  # what another launch found over each row's first keys: [tokens, heads, D] ...
    partial, partial_lse, counters,
    items, members, page_table, positions, query_start,
    scale, splits, split_min, heads,
    stride_qt, stride_qh, stride_page, stride_slot, stride_head, stride_scale_page, stride_scale_slot,
    stride_ot, stride_oh, stride_table,
    FORM: tl.constexpr,  # "pieces" or "prefix"
    PAGE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,  # times log2(e), as scores are; 0: none
    SPLIT: tl.constexpr, HAS_PREFIX: tl.constexpr, HAS_LSE: tl.constexpr, TWO_PHASE: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr,
    PAIRS: tl.constexpr,  # what 8-bit pages hold; strides are then those of 16-bit words
    NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP  # query tokens of a block
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    block = tl.program_id(1)
    split = tl.program_id(2)
    m = tl.arange(0, BLOCK_M)
    index = m // GROUP
    head = kv_head * GROUP + m % GROUP

    start = 0  # first key
    if FORM == "prefix":
        row = tl.load(items + block * 4)
        if row < 0:
            return
        run = tl.load(items + block * 4 + 1)
        count = tl.load(items + block * 4 + 2)
        end = tl.load(items + block * 4 + 3)
        valid = (index < count) & (index < BLOCK_Q)
        member = members + (run + index) * 2
        member_row = tl.load(member, mask=valid, other=0)
        within = tl.load(member + 1, mask=valid, other=0)
        token = tl.load(query_start + member_row, mask=valid, other=0) + within
        valid &= token < tl.load(query_start + member_row + 1, mask=valid, other=0)
        at = tl.where(valid, end - 1, -1)
        full = end
        first = 0
    else:
        item = items + block * 8
        row = tl.load(item)
        if row < 0:
            return
        split = tl.load(item + 1)
        used = tl.load(item + 2)
        token = tl.load(item + 3) + index
        valid = (index < tl.load(item + 4)) & (m < BLOCK_Q * GROUP)
        start = tl.load(item + 5)  # of this piece
        if not HAS_PREFIX:
            start = tl.multiple_of(start, BLOCK_N)
        end = tl.load(item + 6)
        full = tl.load(item + 7)
        at = tl.load(positions + token, mask=valid, other=-1).to(tl.int32)
        first = start
        if WINDOW:
            first = tl.maximum(first, full - WINDOW)

    begin, last = start, end
    if SPLIT and FORM == "prefix":
        keys = tl.maximum(end - start, 0)
        length = tl.maximum(split_min, tl.cdiv(tl.cdiv(keys, splits), BLOCK_N) * BLOCK_N)
        used = tl.maximum(tl.cdiv(keys, length), 1)
        if split >= used:
            return
        begin = start + split * length
        last = tl.minimum(begin + length, end)

    d = tl.arange(0, DP)
    q_at = q_ptr + (token.to(tl.int64) * stride_qt + head * stride_qh)[:, None]
    SIZE: tl.constexpr = D // 2 if PAIRS != "" else D  # of a head as the walk sees it: in words
    WIDTH: tl.constexpr = DP // 2 if PAIRS != "" else DP
    if PAIRS != "":
        i = 2 * tl.arange(0, WIDTH)
        there = valid[:, None] & (i < D)[None, :]
        q = tl.load(q_at + i[None, :], mask=there, other=0.0).to(tl.float16)
        q_odd = tl.load(q_at + 1 + i[None, :], mask=there, other=0.0).to(tl.float16)
        k_ptr = k_ptr.to(tl.pointer_type(tl.int16))
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16))
    else:
        q = tl.load(q_at + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
        q_odd = q
    table = page_table + row.to(tl.int64) * stride_table
    k = k_ptr + kv_head * stride_head
    v = v_ptr + kv_head * stride_head
    k_scales += kv_head
    v_scales += kv_head
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    acc_odd = acc
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    if TWO_PHASE:
        middle = begin + tl.maximum(tl.minimum(full, last) - begin, 0) // BLOCK_N * BLOCK_N
        acc, acc_odd, peak, mass = _walk(
            acc, acc_odd, peak, mass, q, q_odd, at, k, v, k_scales, v_scales, table, begin, middle, first, scale,
            stride_page, stride_slot, stride_scale_page, stride_scale_slot,
            PAGE, SIZE, WIDTH, BLOCK_N, WINDOW, CHUNKED, SOFTCAP, False, SCALED, PRECISION, PAIRS, NATIVE,
        )  # fmt: skip
        begin = middle
    acc, acc_odd, peak, mass = _walk(
        acc, acc_odd, peak, mass, q, q_odd, at, k, v, k_scales, v_scales, table, begin, last, first, scale,
        stride_page, stride_slot, stride_scale_page, stride_scale_slot,
        PAGE, SIZE, WIDTH, BLOCK_N, WINDOW, CHUNKED, SOFTCAP, True, SCALED, PRECISION, PAIRS, NATIVE,
    )  # fmt: skip

    if PAIRS != "":
        acc = tl.interleave(acc, acc_odd)
    out = acc * tl.where(mass > 0.0, 1.0 / mass, 0.0)[:, None]
    lse = peak + tl.log2(mass)
    if not SPLIT or used == 1:
        _store(out_ptr, lse_ptr, prefix_out, prefix_lse, row_begin, out, lse, d, row, token, head, valid, stride_ot,
               stride_oh, heads, D, HAS_PREFIX, HAS_LSE)  # fmt: skip
    else:
        sides = tl.num_programs(0)
        slot, apart = (block * sides + kv_head).to(tl.int64), 1
        place = slot * splits  # of the first part's result; the others lie `apart`
        if FORM == "pieces":
            slot, apart = ((block - split) * sides + kv_head).to(tl.int64), sides
            place = slot
        rows = (place + split * apart) * BLOCK_M + m
        tl.store(partial + rows[:, None] * DP + d[None, :], out, mask=valid[:, None])
        tl.store(partial_lse + rows, lse, mask=valid)
        tl.debug_barrier()
        if tl.atomic_add(counters + slot, 1, sem="acq_rel") == used - 1:
            tl.store(counters + slot, 0)
            _add_up(
                partial, partial_lse, place * BLOCK_M + m, apart * BLOCK_M, used,
                out_ptr, lse_ptr, prefix_out, prefix_lse, row_begin, row, token, head, valid, stride_ot, stride_oh,
                heads, D, DP, BLOCK_M, HAS_PREFIX, HAS_LSE,
            )  # fmt: skip
