# mypy: allow-untyped-defs, allow-incomplete-defs
"""A step's batch out of the slots' state, in one launch a KV group. Plain twin: `kernels.batch.assemble`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.batch_assembly import Assembled
from quire.kernels.triton.launch import overlap, power_of_two


@triton.jit(do_not_specialize=["rows", "stride_row", "stride_out"])
def assemble_kernel(
    table, tokens, pages, input_ids, positions, kv_slots, query_start, kv_len, page_table, rows,
    stride_row, stride_tokens, stride_pages, stride_out,
    PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program; each adds up the counts before its own."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    slot, start = tl.load(table + row), tl.load(table + stride_row + row)
    count, shift = tl.load(table + 2 * stride_row + row), tl.load(table + 3 * stride_row + row)
    held = start - shift
    every = tl.arange(0, ROWS)
    counts = tl.load(table + 2 * stride_row + every, mask=every < rows, other=0)
    first = tl.sum(tl.where(every < row, counts, 0), 0)
    if row == 0:
        tl.store(query_start, 0)
    tl.store(query_start + row + 1, (first + count).to(tl.int32))
    tl.store(kv_len + row, (held + count).to(tl.int32))
    block = tl.arange(0, BLOCK)
    own = pages + slot * stride_pages
    for done in range(0, count, BLOCK):
        here = done + block < count
        position = held + done + block
        where = first + done + block
        tl.store(positions + where, position, mask=here)
        known = tl.load(tokens + slot * stride_tokens + shift + position, mask=here, other=0)
        tl.store(input_ids + where, known.to(tl.int64), mask=here)
        page = tl.load(own + position // PAGE, mask=here, other=0).to(tl.int64)
        tl.store(kv_slots + where, page * PAGE + position % PAGE, mask=here)
    needed = tl.minimum((held + count + PAGE - 1) // PAGE, stride_out)
    for done in range(0, needed, BLOCK):
        here = done + block < needed
        page = tl.load(own + done + block, mask=here, other=0)
        tl.store(page_table + row.to(tl.int64) * stride_out + done + block, page, mask=here)


def assemble(
    rows: torch.Tensor, tokens: torch.Tensor, pages: torch.Tensor, page_size: int, count: int, width: int
) -> Assembled:
    """Arguments as in the twin; of the page table only what a row needs is filled in."""
    size, device = rows.shape[1], rows.device
    long = [torch.empty(count, dtype=torch.int64, device=device) for _ in range(3)]
    short = [torch.empty(shape, dtype=torch.int32, device=device) for shape in ((size + 1,), (size,), (size, width))]
    assemble_kernel[(size,)](
        rows, tokens, pages, *long, *short, size, rows.stride(0), tokens.stride(0), pages.stride(0), width,
        PAGE=page_size, ROWS=max(power_of_two(size), 2048), BLOCK=128, num_warps=4, **overlap(device),
    )  # fmt: skip
    return Assembled(*long, *short)
