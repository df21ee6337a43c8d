"""A page table with some of its pages taken out: those kept move together, their keys are rotated to their new places.

    before   [ 7 | 3 | 9 | 4 | 8 ]   keep 0, 3, 4      rope_shifts: 4 by -2 pages, 8 by -2 pages
    after    [ 7 | 4 | 8 ]

A page that others may read, now or through the prefix index, is never changed: it is shifted into a fresh one. From
then on the table names no pages, because what they hold depends on tokens that are gone. Refuses to know: which pages
are worth keeping.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from quire.memory.manager import Change, KVManager, PageTable
from quire.types.plan import RopeShift


def compact(memory: KVManager, table: PageTable, kept: Sequence[int]) -> tuple[Change, list[int], list[int]] | None:
    """Keep the pages at these indices, ascending, of a table of one group: what changed, and the pages it holds no
    longer, those dropped and those that are read once more. None, and no change, if pages are lacking."""
    pool, index, pages = memory.pool, memory.index, table.pages[0]
    (size,) = (group.tokens_per_page for group in memory.layout.groups)
    moved = [(old, new) for new, old in enumerate(kept) if old != new]
    seen = [old for old, _ in moved if pool.refs(pages[old]) > 1 or index.knows(pages[old])]
    fresh = pool.take(len(seen), table.owner) if seen else []
    if fresh is None:  # what others might have found again is worth less than going on
        shared = [old for old in seen if pool.refs(pages[old]) > 1]
        fresh = pool.take(len(shared), table.owner) if shared else []
        if fresh is None:
            return None
        for old in set(seen) - set(shared):
            index.remove(pages[old], table.owner)
        seen = shared
    targets = dict(zip(seen, fresh, strict=True))
    change = Change()
    rope_shifts: dict[int, RopeShift] = {}
    for old, new in moved:
        by = (new - old) * size
        rope_shift = rope_shifts.setdefault(by, RopeShift(0, [], [], by))
        rope_shift.sources += range(pages[old] * size, (pages[old] + 1) * size)
        target = targets.get(old, pages[old])
        rope_shift.targets += range(target * size, (target + 1) * size)
    change.rope_shifts = list(rope_shifts.values())
    dropped = [pages[i] for i in sorted(set(range(len(pages))).difference(kept), reverse=True)]
    read = [pages[i] for i in reversed(seen)]
    table.pages[0] = [targets.get(i, pages[i]) for i in kept]
    first = next((new for new, old in enumerate(kept) if old != new), len(kept))
    if first < len(kept):
        change.deltas.append((0, first, table.pages[0][first:]))
    memory.break_promises(table)
    table.published[0] = table.written_through[0] = 0
    table.next_publish = sys.maxsize
    table.writable_until = len(kept) * size
    return change, dropped, read
