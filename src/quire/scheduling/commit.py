"""Commit: drawn tokens, scores, options of beams and pooled states of a step go to the sequences they are for, and
those that are over end.

Results match on (sequence, epoch): what was computed for a sequence that lost its pages since counts for nothing.
Refuses to know: plans in the making, who waits.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.memory.manager import KVManager
from quire.scheduling.beam_search import Search, answers
from quire.scheduling.feature import SchedulingFeature
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.sequence import Sequence
from quire.scheduling.sequence_table import SequenceTable
from quire.types.counts import Counts
from quire.types.errors import InputError
from quire.types.events import EngineStats, TokenEvent
from quire.types.plan import Row, StepResult, TokenLogprobs
from quire.types.policy import EventKind
from quire.types.request import FinishReason, Status

RUNNING = Status.RUNNING


class Commit(SchedulingFeature):
    def __init__(self, table: SequenceTable, memory: KVManager, *, streams: bool = True):
        """`streams`: whether every token is told of, not only those of which there is more to say."""
        self._table = table
        self._memory = memory
        self._streams = streams
        self._scores: dict[Sequence, list[TokenLogprobs]] = {}  # prompt log-probabilities so far
        self._pooled: dict[Sequence, list[float]] = {}  # sum of hidden states so far
        self._late: dict[int, tuple[PlanBuilder, set[int]]] = {}  # by step: samples not told of yet

    def apply(self, step: PlanBuilder, result: StepResult, events: list[TokenEvent], stats: EngineStats) -> None:
        """Give every sequence what is its own; publish the pages that are complete. Adds to `events` as it goes: a
        sequence that ends before something fails must still be told of."""
        for i, scores in result.scores.items():
            seq, epoch = step.rows[i]
            if seq.epoch == epoch and seq.status is RUNNING:
                found = self._scores.setdefault(seq, [])
                found += scores[: seq.prompt_len - 1 - len(found)]
        if result.deferred:
            self._late[result.step] = step, set(result.deferred)
        stats.output_tokens += self._samples(step, result, events)
        for late in result.late:
            stats.output_tokens += self._late_samples(late, events)
        for i, vector in result.pooled.items():
            seq, epoch = step.rows[i]
            if seq.epoch == epoch and seq.status is RUNNING:
                events += self._pool(seq, step.plan.rows[i], vector)
        self._publish(step, step.publishing)

    @property
    def awaiting(self) -> bool:
        """Whether samples of earlier steps are still to come, and wanted."""
        for number, (step, left) in list(self._late.items()):
            if not any(s.epoch == epoch and s.status is RUNNING for s, epoch in map(step.samples.__getitem__, left)):
                del self._late[number]
        return bool(self._late)

    def _samples(self, step: PlanBuilder, result: StepResult, events: list[TokenEvent]) -> int:
        """Returns how many tokens that told of."""
        special, streams, told = _special_samples(step, result), self._streams, 0
        plain: list[Sequence] = []
        for i, ((seq, epoch), drawn) in enumerate(zip(step.samples, result.tokens, strict=True)):
            if seq.epoch != epoch:
                continue
            tokens = seq.tokens
            length = len(tokens)
            if length < seq.steady_until and i not in special and len(drawn) == 1 and drawn[0] not in seq.stops:
                if streams:
                    events.append(TokenEvent(seq.request.id, seq.branch, length - seq.prompt_len, drawn))
                tokens += drawn
                seq.pending -= 1
                plain.append(seq)
            elif i in result.deferred or not (drawn or i in special):
                continue  # the latter: planned behind a draw that was followed by forced tokens
            else:
                row = step.plan.rows[step.plan.samples[i].row]
                beam = seq.request.beam is not None
                found = self._search(seq, result.logprobs[i][0]) if beam else [self._advance(seq, row, result, i)]
                told += sum(len(event.tokens) for event in found)
                events += found
        if EventKind.DREW in self._table.observed:
            self._table.tell(EventKind.DREW, [(seq, 1) for seq in plain])
        return told + len(plain)

    def _late_samples(self, late: StepResult, events: list[TokenEvent]) -> int:
        if late.step not in self._late:
            return 0  # all ended since
        step, left = self._late[late.step]
        told = left.difference(late.deferred)
        drawn = self._samples(step, late, events)
        self._publish(step, [step.plan.samples[i].row for i in told])
        left -= told
        if not left:
            del self._late[late.step]
        return drawn

    def _publish(self, step: PlanBuilder, rows: Iterable[int]) -> None:
        for i in rows:
            row, (seq, epoch) = step.plan.rows[i], step.rows[i]
            upto = seq.computed if row.drafts else row.start + row.count
            if row.drafts and self._memory.states is not None and seq.epoch == epoch and seq.status is RUNNING:
                self._memory.states.keep(seq.table.state, upto)
                self._memory.publish_states(seq.table, upto, seq.tokens, seq.request.salt)
            if upto >= seq.table.next_publish and seq.epoch == epoch and seq.status is RUNNING:
                self._memory.publish(seq.table, upto, seq.tokens, seq.request.salt)

    def _advance(self, seq: Sequence, row: Row, result: StepResult, sample: int) -> TokenEvent:
        """Append what was drawn for one sample, up to a stop."""
        drafted, accepted = result.drafts.get(sample, (0, 0))
        if row.drafts:  # KV is there as far as drafts were accepted; pages beyond that go back
            seq.computed += accepted
            if not self._memory.contiguous:
                self._memory.trim(seq.table, seq.computed)
        index, drawn = seq.outputs, list[int]()
        finish = None
        for token in result.tokens[sample]:
            drawn.append(token)
            finish = _ends(seq, token, index + len(drawn))
            if finish:
                break
        seq.tokens += drawn
        seq.pending -= 1
        seq.unsent = max(0, len(drawn) - 1 - accepted)
        if seq.unsent:
            seq.pending = 0  # what is in flight behind it draws nothing: another token is there
        forced = [index for index in result.forced.get(sample, ()) if index < len(drawn)]
        first = index == len(seq.request.outputs)
        if first or drafted or forced:
            self._table.drew(seq, drafted, accepted, len(forced))
        if first:
            self._table.tell(EventKind.FIRST_TOKEN, [(seq, len(drawn))])
        if EventKind.DREW in self._table.observed:
            self._table.tell(EventKind.DREW, [(seq, len(drawn))])
        scores = self._scores.pop(seq, None) if self._scores else None
        if sample in result.errors:
            event = self._table.finish(seq, FinishReason.ERROR, f"the grammar failed: {result.errors[sample]}")
            event.error = InputError.__name__
        elif finish or sample in result.ended:
            event = self._table.finish(seq, finish or FinishReason.STOP)
        else:
            event = TokenEvent(seq.request.id, seq.branch, index, drawn)
            seq.steady_until = 0 if seq.hook is not None or seq.unsent else seq.limit - 1
        event.index, event.tokens = index, drawn
        if first or event.finish or drafted or forced or seq.log.evicted:
            log = seq.log
            event.counts = Counts(max(0, seq.cached), log.blended, log.evicted, len(forced), drafted, accepted)
            event.forced = forced or None
        if sample in result.logprobs:
            event.logprobs = result.logprobs[sample][: len(drawn)]
        if scores:
            event.prompt_logprobs = scores
        return event

    def _search(self, seq: Sequence, options: TokenLogprobs) -> list[TokenEvent]:
        """A beam's options are known; once all are, its search goes a step on, or is over."""
        table, request = self._table, seq.request
        search = table.requests[request.id]
        assert isinstance(search, Search)
        seq.pending -= 1
        if not search.learn(seq, options):
            return []
        if seq is search.root and not seq.outputs:
            table.drew(seq)
            table.tell(EventKind.FIRST_TOKEN, [(seq, 1)])
        lost = search.advance(table.fork)
        table.tell(EventKind.DREW, ((beam, 1) for beam in search.live))
        for old in lost:
            table.retire(old)
        if search.live:
            return []
        found = answers(request, search.results(request.params.n), max(0, seq.cached))
        table.finish_search(search, FinishReason.STOP)
        return found

    def _pool(self, seq: Sequence, row: Row, vector: list[float]) -> list[TokenEvent]:
        """Add hidden states of a part of the prompt; with the last part the request is answered."""
        before = self._pooled.pop(seq, None)
        pooled = [a + b for a, b in zip(before, vector, strict=True)] if before else vector
        if row.start + row.count < seq.prompt_len:
            self._pooled[seq] = pooled
            return []
        event = self._table.finish(seq, FinishReason.STOP)
        event.embedding = [x / seq.prompt_len for x in pooled] if row.pool == "mean" else pooled
        return [event]

    def released(self, seq: Sequence) -> None:
        """It is over, or computes its prompt again."""
        self._scores.pop(seq, None)
        self._pooled.pop(seq, None)

    def step_failed(self) -> None:
        self._late.clear()


def _special_samples(step: PlanBuilder, result: StepResult) -> set[int]:
    """Samples of which there is more to say than the token drawn, or nothing yet."""
    found: set[int] = set()
    for some in (result.drafts, result.forced, result.errors, result.ended, result.logprobs, result.deferred):
        if some:
            found.update(some)
    if step.drafts:
        found.update(i for i, sample in enumerate(step.plan.samples) if step.plan.rows[sample.row].drafts)
    return found


def _ends(seq: Sequence, token: int, outputs: int) -> FinishReason | None:
    if token in seq.stops and outputs >= seq.request.params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if seq.prompt_len + outputs >= seq.limit else None
