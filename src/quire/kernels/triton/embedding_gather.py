# mypy: allow-untyped-defs, allow-incomplete-defs
"""Rows of a table by index: embeddings by token id, or the hidden states whose logits are wanted.

Plain twin: `table[index]`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import overlap, power_of_two


@triton.jit
def gather_kernel(table, index, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + row).to(tl.int64) * stride
    tl.store(out + row * WIDTH + column, tl.load(table + source + column, mask=column < WIDTH), mask=column < WIDTH)


def gather_rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """table [n, width], int index [m] → [m, width]. Indices are not checked."""
    width = table.shape[1]
    out = torch.empty(index.shape[0], width, dtype=table.dtype, device=table.device)
    if len(index):
        block = min(power_of_two(width), 2048)
        gather_kernel[(len(index), -(-width // block))](
            table, index, out, table.stride(0), WIDTH=width, BLOCK=block, **overlap(table.device)
        )
    return out
