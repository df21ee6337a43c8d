"""Goodput as a feature: of the answers that ended well, those that met their own targets, or the server's.

Refuses to know: who is served first.
"""

from __future__ import annotations

from quire.scheduling.feature import SchedulingFeature
from quire.scheduling.features.timeline_recorder import TimelineRecorder
from quire.scheduling.sequence import Sequence
from quire.types.request import FinishReason


class ServiceLevels(SchedulingFeature):
    def __init__(self, timeline: TimelineRecorder, ttft: float | None, tpot: float | None):
        """`ttft`, `tpot`: targets of requests that have none of their own."""
        self._timeline = timeline
        self._ttft, self._tpot = ttft or 0.0, tpot or 0.0

    def finished(self, seq: Sequence, reason: FinishReason | None) -> None:
        log, request, stats = seq.log, seq.request, self._timeline.stats
        if reason not in (FinishReason.STOP, FinishReason.LENGTH) or not log.first_token:
            return
        ttft, tpot = request.slo_ttft or self._ttft, request.slo_tpot or self._tpot
        late = bool(ttft) and log.first_token - log.arrival > ttft
        slow = bool(tpot) and seq.outputs > 1 and (log.ended - log.first_token) / (seq.outputs - 1) > tpot
        stats.missed_ttft += late
        stats.missed_tpot += slow
        stats.met_slo += not (late or slow)
