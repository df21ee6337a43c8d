"""A step's batch out of the slots' state: what every step does before anything else, in plain torch.

    rows table: slot | start | count | shift     ──►     ids, positions and KV places of all tokens; lengths and pages
                                                         of rows

A token's position is its place in the cache: `shift` less than its place among the slot's tokens.

Twin: `triton/batch.py`, one launch. Refuses to know: who fills the slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.kernels.attention_backend import Batch, GroupBatch
from quire.kernels.kv_views import KVViews, allocate_kv
from quire.types.kv import KVLayout


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
    slots, starts, lengths, shifts = rows[0], rows[1], rows[2], rows[3]
    ends = lengths.cumsum(0)
    if rows.device.type == "cpu" and count == rows.shape[1]:  # a token a row: no row is empty where nothing is padded
        places, slot_of, shift_of = starts, slots, shifts
    else:
        row_of = torch.repeat_interleave(lengths, output_size=count)  # [tokens]
        places = torch.arange(count, device=rows.device) + (starts + lengths - ends)[row_of]
        slot_of, shift_of = slots[row_of], shifts[row_of]
    positions = places - shift_of
    return Assembled(
        input_ids=tokens[slot_of, places].long(),
        positions=positions,
        kv_slots=pages[slot_of, positions // page_size].long() * page_size + positions % page_size,
        query_start=F.pad(ends, (1, 0)).int(),
        kv_len=(starts + lengths - shifts).int(),
        page_table=pages[:, :width][slots],
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
