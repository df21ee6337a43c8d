"""What happens to each sequence, recorded as it happens: where a request's time went, and which rows were computed in
vain.

Knows: sequences, timelines, stats. Refuses to know: why the scheduler decides what it decides.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from quire.memory.manager import Hit, KVManager
from quire.memory.prefix_explain import PrefixExplainer
from quire.scheduling.feature import SchedulingFeature
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.sequence import Sequence
from quire.types.clock import Clock
from quire.types.events import EngineStats
from quire.types.plan import StepResult
from quire.types.request import ENDED_WELL, FinishReason
from quire.types.timeline import MAX_CHUNKS, MAX_PREEMPTIONS, Preemption, PrefixOutcome, Timeline

MAX_PAST_REQUESTS = 1024  # remembered after they ended
MAX_PAST_STEPS = 240


class TimelineRecorder(SchedulingFeature):
    def __init__(self, memory: KVManager, clock: Clock):
        self._memory = memory
        self._clock = clock
        self.reset()
        self.steps: deque[tuple[int, int]] = deque(maxlen=MAX_PAST_STEPS)
        self._alignment = memory.layout.alignment
        self._explainer = PrefixExplainer(memory)
        self._past: OrderedDict[str, list[Timeline]] = OrderedDict()
        self._pending_since: dict[Sequence, float] = {}
        self._lost: dict[Sequence, int] = {}  # KV entries it had when it was preempted
        self._recomputed: dict[Sequence, int] = {}  # rows computed a second time
        self._outlived: set[Sequence] = set()  # answers that steps in flight go on with, though they are complete

    def reset(self) -> None:
        self.stats = EngineStats(pages_total=self._memory.pool.total)

    @property
    def pending(self) -> int:
        """Sequences that wait for pages on their way."""
        return len(self._pending_since)

    def past(self, request_id: str) -> list[Timeline]:
        """Timelines of a request that has ended."""
        return self._past.get(request_id, [])

    def waits(self, seq: Sequence) -> None:
        """For pages that are on their way."""
        self._pending_since.setdefault(seq, self._clock.now)

    def evicted(self, seq: Sequence, tokens: int) -> None:
        """KV of so many more of its tokens was dropped."""
        self.stats.evicted_tokens += tokens
        seq.log.evicted = max(seq.log.evicted, seq.evicted)

    def overrun(self, rows: int) -> None:
        """Tokens beyond a stop string are dropped."""
        self.stats.waste["overrun"] += rows

    # ---- listening ------------------------------------------------------------------------------------------

    def admitted(self, seq: Sequence, hit: Hit | None) -> None:
        log, now = seq.log, self._clock.now
        since = self._pending_since.pop(seq, None) if self._pending_since else None
        if since is not None:
            log.pending += now - since
        if not log.admitted:
            log.admitted = now
            log.cached = max(0, seq.cached)
            log.page_size = self._alignment
            self.stats.queue_time.observe(max(0.0, now - log.arrival))
            if hit is not None:
                self._explain_prefix(seq, hit)
        elif seq in self._lost:
            last = log.preemptions[-1]
            last.resumed = last.resumed or now
            again = max(0, self._lost.pop(seq) - seq.computed)
            last.recomputed += again
            self._recomputed[seq] = self._recomputed.get(seq, 0) + again
            self.stats.waste["recompute"] += again

    def _explain_prefix(self, seq: Sequence, hit: Hit) -> None:
        request, log = seq.request, seq.log
        reach = seq.limit if seq.hook is None else seq.hook.reach
        every = request.params.prompt_logprobs is not None or request.pooling == "mean" or reach == 1
        log.prefix = self._explainer.outcome(seq.table, hit, seq.tokens, request.salt, every, reach)
        log.paged = hit.shared
        if self._memory.states is not None:
            log.snapshot = hit.tokens
        if log.prefix is PrefixOutcome.EVICTED and (gone := self._explainer.eviction(seq.table, hit)):
            log.gone_at, log.gone_for = gone

    def step_planned(self, step: PlanBuilder) -> None:
        if step.tokens == len(step.rows):
            return
        for row, (seq, _) in zip(step.plan.rows, step.rows, strict=True):
            if row.count > 1:
                chunks = seq.log.chunks
                if len(chunks) < MAX_CHUNKS:
                    chunks.append((step.now, row.count))
                else:
                    chunks[-1] = (chunks[-1][0], chunks[-1][1] + row.count)

    def drew(self, seq: Sequence, drafted: int, accepted: int, forced: int) -> None:
        log, stats, now = seq.log, self.stats, self._clock.now
        if not log.first_token:
            log.first_token = now
            stats.prefill_time.observe(max(0.0, now - log.admitted))
        log.forced += forced
        log.drafted += drafted
        log.accepted += accepted
        stats.forced_tokens += forced
        stats.drafts += drafted > 0
        stats.drafted_tokens += drafted
        stats.accepted_tokens += accepted
        stats.accepted_at += [0] * (accepted - len(stats.accepted_at))
        for place in range(accepted):
            stats.accepted_at[place] += 1

    def preempted(self, seq: Sequence) -> None:
        self.stats.preemptions += 1
        self._lost[seq] = max(self._lost.get(seq, 0), seq.computed)
        marks = seq.log.preemptions
        if len(marks) < MAX_PREEMPTIONS or marks[-1].resumed:
            marks.append(Preemption(self._clock.now, seq.computed))
            del marks[:-MAX_PREEMPTIONS]

    def step_landed(self, step: PlanBuilder, result: StepResult) -> None:
        plan, stats = step.plan, self.stats
        if not plan.computes:
            return  # it only waited for pages
        tokens = step.tokens
        stats.steps += 1
        stats.rows += tokens + result.padding
        stats.waste["padding"] += result.padding
        stats.sparse_bytes += result.attention_bytes[0]
        stats.sparse_bytes_of_all += result.attention_bytes[1]
        stats.exchanged_bytes += result.exchanged_bytes
        for drafted, accepted in result.drafts.values():
            stats.rows += drafted
            stats.waste["draft"] += drafted - accepted
        stats.step_seconds += result.seconds
        stats.step_tokens.observe(tokens)
        self.steps.append((len(plan.rows), tokens))
        if self._outlived:
            rows = zip(plan.rows, step.rows, strict=True)
            stats.waste["overrun"] += sum(row.count for row, (seq, _) in rows if seq in self._outlived)
            self._outlived = {seq for seq in self._outlived if seq.inflight}

    def finished(self, seq: Sequence, reason: FinishReason | None) -> None:
        log, stats = seq.log, self.stats
        since, again = self._pending_since.pop(seq, None), self._recomputed.pop(seq, 0)
        self._lost.pop(seq, None)
        if reason is None:
            return
        log.ended = max(self._clock.now, log.arrival)
        log.finish, log.outputs = reason.value, seq.outputs
        if since is not None:
            log.pending += log.ended - since
        stats.finished[reason] = stats.finished.get(reason, 0) + 1
        if reason in ENDED_WELL and seq.inflight:
            self._outlived.add(seq)
        if log.first_token:
            stats.decode_time.observe(log.ended - log.first_token)
            stats.inference_time.observe(log.ended - log.admitted)
            stats.request_preemptions.observe(len(log.preemptions))
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            deadline = seq.request.deadline
            cause = "late" if 0 < deadline <= log.ended else "cancelled" if reason is FinishReason.ABORT else "failed"
            stats.waste[cause] += seq.attained - again + log.accepted
        self._past.setdefault(log.request, []).append(log)
        self._past.move_to_end(log.request)
        if len(self._past) > MAX_PAST_REQUESTS:
            self._past.popitem(last=False)
