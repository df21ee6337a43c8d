"""What happens to each sequence, written down as it happens: times for those who ask where a request's time went,
counts of rows computed in vain for those who pay for them.

Knows: sequences, timelines, stats. Refuses to know: why the scheduler decides what it decides.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from quire.memory.manager import Hit, KVManager
from quire.memory.prefix_explain import PrefixExplainer
from quire.scheduling.sequence import Sequence
from quire.types.events import EngineStats
from quire.types.plan import StepPlan, StepResult
from quire.types.request import FinishReason
from quire.types.timeline import MAX_CHUNKS, MAX_PREEMPTIONS, Preemption, PrefixOutcome, Timeline

KEPT = 1024  # requests remembered after they ended
STEPS = 240  # latest steps remembered


class TimelineRecorder:
    def __init__(self, memory: KVManager, stats: EngineStats):
        self.stats = stats
        self.now = 0.0  # as the caller last said
        self.steps: deque[tuple[int, int]] = deque(maxlen=STEPS)
        self._alignment = memory.layout.alignment
        self._explainer = PrefixExplainer(memory)
        self._past: OrderedDict[str, list[Timeline]] = OrderedDict()

    def of(self, request_id: str) -> list[Timeline]:
        """Timelines of a request that has ended."""
        return self._past.get(request_id, [])

    # ---- what the scheduler reports -------------------------------------------------------------------------

    def arrived(self, seq: Sequence) -> None:
        request = seq.request
        seq.log = Timeline(request=request.id, branch=seq.branch, prompt=seq.prompt_len, arrival=request.arrival)

    def waits(self, seq: Sequence) -> None:
        """For pages somebody else is computing."""
        seq.waits_since = seq.waits_since or self.now

    def started(self, seq: Sequence, hit: Hit | None = None) -> None:
        """Admitted, or resumed; without a hit, as a branch of a sequence that runs."""
        log = seq.log
        if seq.waits_since:
            log.pending += self.now - seq.waits_since
            seq.waits_since = 0.0
        if not log.admitted:
            log.admitted = self.now
            log.cached = max(0, seq.cached)
            log.page_size = self._alignment
            self.stats.queue_time.observe(max(0.0, self.now - log.arrival))
            if hit is not None:
                request = seq.request
                every = request.params.prompt_logprobs is not None or request.pooling == "mean" or seq.reach == 1
                log.prefix = self._explainer.outcome(seq.table, hit, request.prompt, request.salt, every, seq.reach)
                if log.prefix is PrefixOutcome.EVICTED and (gone := self._explainer.eviction(seq.table, hit)):
                    log.gone_at, log.gone_for = gone
        elif log.preemptions:
            last = log.preemptions[-1]
            if not last.resumed:
                last.resumed = self.now
            again = max(0, seq.lost - seq.hit)
            last.recomputed += again
            seq.rows -= again
            self.stats.waste["recompute"] += again
            seq.lost = 0

    def row(self, seq: Sequence, count: int) -> None:
        seq.rows += count
        if count > 1:
            chunks = seq.log.chunks
            if len(chunks) < MAX_CHUNKS:
                chunks.append((self.now, count))
            else:
                chunks[-1] = (chunks[-1][0], chunks[-1][1] + count)

    def preempted(self, seq: Sequence) -> None:
        self.stats.preemptions += 1
        seq.lost = max(seq.lost, seq.computed)
        marks = seq.log.preemptions
        if len(marks) < MAX_PREEMPTIONS or marks[-1].resumed:
            marks.append(Preemption(self.now, seq.computed))
            del marks[:-MAX_PREEMPTIONS]

    def drew(self, seq: Sequence) -> None:
        """Its first token."""
        log = seq.log
        log.first_token = self.now
        self.stats.prefill_time.observe(max(0.0, self.now - log.admitted))

    def forced(self, seq: Sequence, tokens: int) -> None:
        """By a grammar, after the token drawn."""
        self.stats.forced_tokens += tokens
        seq.log.forced += tokens

    def guessed(self, seq: Sequence, offered: int, accepted: int) -> None:
        """Tokens were guessed ahead for it, and so many of them were right."""
        seq.rows += accepted
        seq.log.drafted += offered
        seq.log.accepted += accepted
        self.stats.drafts += offered > 0
        self.stats.drafted_tokens += offered
        self.stats.accepted_tokens += accepted

    def forgot(self, seq: Sequence, tokens: int) -> None:
        """KV of so many more of its tokens was dropped."""
        self.stats.evicted_tokens += tokens
        seq.log.evicted = max(seq.log.evicted, seq.evicted)

    def cut(self, rows: int) -> None:
        """Tokens beyond a stop string are dropped."""
        self.stats.waste["overrun"] += rows

    def ended(self, seq: Sequence, reason: FinishReason) -> None:
        log, stats = seq.log, self.stats
        log.ended = max(self.now, log.arrival)
        log.finish, log.outputs = reason.value, seq.outputs
        if seq.waits_since:
            log.pending += log.ended - seq.waits_since
        stats.finished[reason] = stats.finished.get(reason, 0) + 1
        if log.first_token:
            stats.decode_time.observe(log.ended - log.first_token)
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            deadline = seq.request.deadline
            cause = "late" if 0 < deadline <= log.ended else "cancelled" if reason is FinishReason.ABORT else "failed"
            stats.waste[cause] += seq.rows
            seq.rows = 0
        self._past.setdefault(log.request, []).append(log)
        self._past.move_to_end(log.request)
        if len(self._past) > KEPT:
            self._past.popitem(last=False)

    def stepped(self, plan: StepPlan, result: StepResult, rows: list[tuple[Sequence, int]]) -> None:
        """A step is done; rows of sequences that had stopped before it were for nothing."""
        stats, tokens = self.stats, plan.tokens
        if not plan.computes:
            return  # it only waited for pages
        stats.steps += 1
        offered, accepted = (sum(counts) for counts in zip((0, 0), *result.drafts.values(), strict=True))
        stats.rows += tokens + offered + result.padding
        stats.waste["padding"] += result.padding
        stats.waste["draft"] += offered - accepted
        stats.step_seconds += result.seconds
        stats.step_tokens.observe(tokens)
        self.steps.append((len(plan.rows), tokens))
        for row, (seq, _) in zip(plan.rows, rows, strict=True):
            if seq.log.finish in ("stop", "length"):
                stats.waste["overrun"] += row.count
