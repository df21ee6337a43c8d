"""A picture of the scheduler at one moment. Refuses to change anything."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from quire.memory.manager import KVManager
from quire.memory.prefix_explain import page_map, prefix_tree, tier_maps
from quire.memory.tiers import Directory
from quire.scheduling.sequence import Sequence
from quire.scheduling.sequence_table import SequenceTable
from quire.types.events import EngineStats, TierStats
from quire.types.plan import Capacity
from quire.types.view import EngineView, LiveSequence

MAX_SEQUENCES = 256


def picture(
    now: float,
    *,
    sequences: SequenceTable,
    memory: KVManager,
    directory: Directory,
    stats: EngineStats,
    capacity: Capacity,
    steps: Iterable[tuple[int, int]],
) -> EngineView:
    running = list(sequences.running)
    shown = [*running, *sequences.waiting.first(MAX_SEQUENCES)][:MAX_SEQUENCES]
    return EngineView(
        now=now,
        stats=stats,
        slots=capacity.slots,
        max_batch_tokens=capacity.max_batch_tokens,
        page_size=memory.layout.groups[0].tokens_per_page,
        sequences=[_live(seq, now) for seq in shown],
        owners=[seq.key for seq in running],
        tiers=[page_map(memory, [seq.table for seq in running]), *tier_maps(directory)],
        prefixes=prefix_tree(memory),
        steps=list(steps),
    )


def counters(
    stats: EngineStats, waiting: int, running: int, memory: KVManager, capacity: Capacity, tiers: list[TierStats]
) -> EngineStats:
    """The counters so far, with the gauges of now."""
    return replace(
        stats,
        finished=dict(stats.finished),
        waste=dict(stats.waste),
        accepted_at=list(stats.accepted_at),
        waiting=waiting,
        running=running,
        pages_used=memory.pool.used,
        pages_cached=memory.pool.cached,
        states_total=memory.states.total if memory.states is not None else 0,
        states_used=memory.states.used if memory.states is not None else 0,
        snapshots=memory.states.cached if memory.states is not None else 0,
        pages_peak=memory.pool.peak,
        kv_slots_allocated=memory.slots_allocated,
        kv_slots_filled=memory.slots_filled,
        kv_bytes=capacity.pages * memory.layout.page_bytes,
        tiers=tiers,
    )


def _live(seq: Sequence, now: float) -> LiveSequence:
    return LiveSequence(
        seq.request.id,
        seq.branch,
        seq.status.value,
        max(0.0, now - seq.request.arrival),
        seq.prompt_len,
        seq.computed,
        seq.outputs,
        seq.limit,
        max(0, seq.cached),
        sum(len(pages) for pages in seq.table.pages),
    )
