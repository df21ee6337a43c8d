"""A step's batch out of the slots' state: what every step does before anything else, in plain torch.

    rows table: slot | start | count | shift     ──►     ids, positions and KV places of all tokens; lengths and pages
                                                         of rows

A token's position is its place in the cache: `shift` less than its place among the slot's tokens.

Twin: `triton/batch.py`, one launch. Refuses to know: who fills the slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from quire.kernels.attention_backend import Batch, GroupBatch
from quire.kernels.kv_views import KVViews, allocate_kv
from quire.types.kv import KVLayout

Ints = npt.NDArray[np.integer[Any]]


class Assembled(NamedTuple):
    input_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    kv_slots: torch.Tensor  # [tokens] int64: page * page_size + offset
    query_start: torch.Tensor  # [rows + 1] int32
    kv_len: torch.Tensor  # [rows] int32
    page_table: torch.Tensor  # [rows, pages] int32; what lies behind a row's need may be anything


def assemble(
    rows: torch.Tensor,  # [4 or more, rows] int64
    tokens: torch.Tensor,  # [slots, length] int32: every slot's known tokens
    pages: torch.Tensor,  # [slots, pages] int32: every slot's page table
    page_size: int,
    count: int,  # tokens of all rows
    width: int,  # pages of the longest row, at most
) -> Assembled:
    if rows.device.type == "cpu" and count == rows.shape[1]:  # a token a row: no row is empty where nothing is padded
        return _assemble_decode(rows.numpy(), tokens.numpy(), pages.numpy(), page_size, width)
    slots, starts, lengths, shifts = rows[0], rows[1], rows[2], rows[3]
    ends = lengths.cumsum(0)
    row_of = torch.repeat_interleave(lengths, output_size=count)  # [tokens]
    places = torch.arange(count, device=rows.device) + (starts + lengths - ends)[row_of]
    slot_of = slots[row_of]
    positions = places - shifts[row_of]
    return Assembled(
        input_ids=tokens[slot_of, places].long(),
        positions=positions,
        kv_slots=pages[slot_of, positions // page_size].long() * page_size + positions % page_size,
        query_start=F.pad(ends, (1, 0)).int(),
        kv_len=(starts + lengths - shifts).int(),
        page_table=pages[:, :width][slots],
    )


def _assemble_decode(rows: Ints, tokens: Ints, pages: Ints, page_size: int, width: int) -> Assembled:
    """Of rows of one token each, in numpy, which takes a third of torch's time for so little."""
    slots, places = rows[0], rows[1]
    positions = places - rows[3]
    page, offset = np.divmod(positions, page_size)
    return Assembled(
        input_ids=torch.from_numpy(tokens[slots, places].astype(np.int64)),
        positions=torch.from_numpy(positions),
        kv_slots=torch.from_numpy(pages[slots, page].astype(np.int64) * page_size + offset),
        query_start=torch.arange(len(slots) + 1, dtype=torch.int32),
        kv_len=torch.from_numpy((positions + 1).astype(np.int32)),
        page_table=torch.from_numpy(pages[slots, :width]),
    )


def whole_sequence(layout: KVLayout, count: int, device: torch.device) -> tuple[Batch, KVViews]:
    """One sequence of `count` tokens from its first on, and pages for it: to run a model without an engine."""
    positions = torch.arange(count, device=device)
    groups, used = [], 1
    for spec in layout.groups:
        pages = -(-count // spec.tokens_per_page)
        table = torch.arange(used, used + pages, dtype=torch.int32, device=device)[None]
        slots = table[0, positions // spec.tokens_per_page].long() * spec.tokens_per_page
        groups.append(GroupBatch(spec.tokens_per_page, table, slots + positions % spec.tokens_per_page))
        used += pages
    batch = Batch(
        positions=positions,
        query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
        kv_len=torch.tensor([count], dtype=torch.int32, device=device),
        counts=[count],
        kv_lens=[count],
        groups=tuple(groups),
    )
    return batch, KVViews(allocate_kv(layout, used, device), layout)
