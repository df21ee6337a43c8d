"""Shared prefixes: rows whose page tables begin alike attend the common pages together, reading them once.

    tables      r0: [ 7 3 9 | 4   ]                 group {r0, r1, r2}: keys of 7 3 9, all their queries in one tile
                r1: [ 7 3 9 | 5 6 ]        ──►       then each row:      its own keys from there on, joined by log-sum
                r2: [ 7 3 9 | 8   ]                 group {r3, r4}: ...

Any number of groups, each of any length. Pages are compared by number: equal numbers are equal memory. Host side
only; plain lists in, small integer arrays out. Refuses to know: tensors' contents, why rows share pages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.triton.paged_attention import PrefixLists

Ints = npt.NDArray[np.int32]

WORTH_KEYS = 512  # key reads a group must save, to be worth its launch


@dataclass(frozen=True)
class Group:
    rows: tuple[int, ...]
    pages: int  # shared by all of them


def find_groups(
    tables: Sequence[Sequence[int]], starts: Sequence[int], page_size: int, worth: int = WORTH_KEYS
) -> list[Group]:
    """Rows to attend together so that the fewest keys are read. `tables`: pages of each row; `starts`: position of
    its first query this step, so that only pages which every query sees in full are shared."""
    whole = [min(start // page_size, len(table)) for start, table in zip(starts, tables, strict=True)]
    groups = _best(tables, whole, [row for row, pages in enumerate(whole) if pages], 0)[1]
    return [group for group in groups if (len(group.rows) - 1) * group.pages * page_size >= worth]


def _best(
    tables: Sequence[Sequence[int]], whole: Sequence[int], rows: list[int], depth: int
) -> tuple[int, list[Group]]:
    """(pages of reading saved, groups) for rows that agree on their first `depth` pages: stop here, or go on in each
    of the sets that agree on the next page."""
    while True:
        sets: defaultdict[int, list[int]] = defaultdict(list)
        for row in rows:
            if whole[row] > depth:
                sets[tables[row][depth]].append(row)
        if len(sets) != 1 or len(next(iter(sets.values()))) < len(rows):
            break
        depth += 1
    found = [_best(tables, whole, same, depth + 1) for same in sets.values() if len(same) > 1]
    further = sum(saved for saved, _ in found)
    here = (len(rows) - 1) * depth
    if here >= further:
        return (here, [Group(tuple(rows), depth)]) if here else (0, [])
    return further, [group for _, groups in found for group in groups]


def cut(groups: Sequence[Group], counts: Sequence[int], page_size: int, block_q: int) -> tuple[Ints, Ints, Ints]:
    """(items, members, row_begin) as `PrefixLists` holds them, for tiles of `block_q` query tokens."""
    items: list[tuple[int, int, int, int]] = []
    members: list[tuple[int, int]] = []
    row_begin = np.zeros(len(counts), np.int32)
    for group in groups:
        keys = group.pages * page_size
        queries = [(row, index) for row in group.rows for index in range(counts[row])]
        for first in range(0, len(queries), block_q):
            items.append((group.rows[0], len(members) + first, min(block_q, len(queries) - first), keys))
        members += queries
        row_begin[list(group.rows)] = keys
    return np.array(items, np.int32).reshape(-1, 4), np.array(members, np.int32).reshape(-1, 2), row_begin


def prefix_block(queries: int, group_heads: int) -> int:
    """Rows of the query tile for groups of about this many query tokens."""
    return 64 if queries * group_heads > 16 else 16


def prefix_lists(
    groups: Sequence[Group], counts: Sequence[int], page_size: int, group_heads: int, device: torch.device,
    most_items: int | None = None, most_members: int | None = None,
) -> PrefixLists | None:  # fmt: skip
    """The groups on the device; None if there are none. With bounds, padded to them: same shapes for a captured graph
    (copy the tensors into the ones it was captured with)."""
    if not groups:
        return None
    largest = max(sum(counts[row] for row in group.rows) for group in groups)
    block_m = max(prefix_block(largest, group_heads), 1 << (group_heads - 1).bit_length())
    items, members, row_begin = cut(groups, counts, page_size, block_m // group_heads)
    if most_items is not None:
        items = np.concatenate([items, np.full((most_items - len(items), 4), -1, np.int32)])
    if most_members is not None:
        members = np.concatenate([members, np.zeros((most_members - len(members), 2), np.int32)])
    longest = max(group.pages for group in groups) * page_size
    return PrefixLists(_ship(items, device), _ship(members, device), _ship(row_begin, device), block_m, longest)


def _ship(array: Ints, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
