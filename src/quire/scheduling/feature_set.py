"""The features that every scheduler has, in the order they are told of things. Another one is a line here, or a
`SchedulingFeature` that is given to the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quire.memory.manager import KVManager
from quire.memory.tiers import Directory
from quire.scheduling.feature import SchedulingFeature
from quire.scheduling.features.blend_reuse import BlendReuse
from quire.scheduling.features.draft_budgets import Drafting
from quire.scheduling.features.kv_eviction import KVEviction
from quire.scheduling.features.kv_handover import KVHandover
from quire.scheduling.features.length_prediction import LengthPrediction
from quire.scheduling.features.service_levels import ServiceLevels
from quire.scheduling.features.sessions import Sessions
from quire.scheduling.features.tier_prefetch import TierPrefetch
from quire.scheduling.features.timeline_recorder import TimelineRecorder
from quire.scheduling.features.wait_prediction import WaitPrediction
from quire.scheduling.length_predictor import LengthPredictor
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.preemption import PreemptionGuard
from quire.scheduling.prefill_budget import PrefillLimiter
from quire.scheduling.sequence_table import SequenceTable
from quire.types.clock import Clock
from quire.types.plan import Capacity


class FeatureSet:
    def __init__(
        self,
        table: SequenceTable,
        memory: KVManager,
        capacity: Capacity,
        clock: Clock,
        in_flight: Iterable[PlanBuilder],
        *,
        kv_policy: str,
        session_quota: float,
        preempt: str,
        slo: tuple[float | None, float | None] = (None, None),
        predictor: LengthPredictor | None = None,
        limiter: PrefillLimiter,
        late_last: bool = False,
        max_wait: float = 0.0,
    ):
        directory = Directory(
            capacity.tiers,
            memory.index,
            memory.layout.page_bytes,
            kv_policy,
            clock,
            memory.states,
            memory.state_pages,
        )
        self.timeline = TimelineRecorder(memory, clock)
        self.service_levels = ServiceLevels(self.timeline, *slo)
        self.waits = WaitPrediction(
            table,
            memory,
            limiter,
            self.timeline,
            clock,
            lengths=predictor is not None,
            late_last=late_last,
            slo_ttft=slo[0],
            max_wait=max_wait,
        )
        self.preemption = PreemptionGuard(memory, self.timeline)
        self.tiers = TierPrefetch(
            memory, directory, self.timeline, table.waiting, lambda: self.preemption.spare, preempt
        )
        self.handover = KVHandover(memory, directory, clock, in_flight, layerwise=capacity.layerwise)
        self.sessions = Sessions(memory, directory, session_quota, clock)
        self.eviction = KVEviction(memory, capacity, self.timeline)
        self.blend_reuse = BlendReuse(memory, capacity, directory, table, self.timeline)
        self.drafting = Drafting(capacity, clock) if capacity.drafts else None
        self.lengths = LengthPrediction(predictor, self.timeline) if predictor is not None else None

    def __iter__(self) -> Iterator[SchedulingFeature]:
        optional = [feature for feature in (self.drafting, self.lengths) if feature is not None]
        listening = [self.timeline, self.service_levels, self.waits, self.preemption, *optional]
        shared = [*listening, self.eviction, self.blend_reuse, self.tiers, self.handover, self.sessions]
        return iter(shared)
