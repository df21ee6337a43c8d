"""What a step brought: drawn tokens, scores, options of beams and pooled states go to the sequences they are for, and
those that are over end.

Results match on (sequence, epoch): what was computed for a sequence that lost its pages since counts for nothing.
Refuses to know: plans in the making, who waits.
"""

from __future__ import annotations

from quire.memory.manager import KVManager
from quire.scheduling.features.beam_search import answers
from quire.scheduling.features.kv_eviction import KVEviction
from quire.scheduling.features.timeline_recorder import TimelineRecorder
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.sequence import Sequence
from quire.scheduling.sequence_table import SequenceTable
from quire.types.errors import InputError
from quire.types.events import TokenEvent
from quire.types.plan import Row, StepResult, TokenLogprobs
from quire.types.request import FinishReason, Status


class Commit:
    def __init__(self, sequences: SequenceTable, memory: KVManager, timeline: TimelineRecorder, eviction: KVEviction):
        self._sequences = sequences
        self._memory = memory
        self._timeline = timeline
        self._eviction = eviction

    def take(self, builder: PlanBuilder, result: StepResult, events: list[TokenEvent]) -> None:
        """Give everybody what is theirs; name the pages that are complete. Adds to `events` as it goes: whoever ends
        before something fails must still be told."""
        for i, scores in result.scores.items():
            seq, epoch = builder.rows[i]
            if seq.epoch == epoch:
                seq.scores += scores[: seq.prompt_len - 1 - len(seq.scores)]
        if result.mass:
            self._eviction.learn(builder, result)
        for i, (seq, epoch) in enumerate(builder.samples):
            if seq.epoch == epoch and seq.status is Status.RUNNING:
                if seq.request.beam is not None:
                    events += self._branch(seq, result.logprobs[i][0])
                else:
                    events.append(self._advance(seq, result, i))
        for i, vector in result.pooled.items():
            seq, epoch = builder.rows[i]
            if seq.epoch == epoch and seq.status is Status.RUNNING:
                events += self._pool(seq, builder.plan.rows[i], vector)
        for row, (seq, epoch) in zip(builder.plan.rows, builder.rows, strict=True):
            upto = seq.computed if row.drafts else row.start + row.count
            if upto >= seq.table.next_publish and seq.epoch == epoch and seq.status is Status.RUNNING:
                self._memory.publish(seq.table, upto, seq.tokens, seq.request.salt)

    def _advance(self, seq: Sequence, result: StepResult, sample: int) -> TokenEvent:
        """Append what was drawn for one sample, up to a stop."""
        offered, accepted = self._settle(seq, *result.drafts.get(sample, (0, 0))) if seq.drafts else (0, 0)
        index = seq.outputs
        drawn: list[int] = []
        finish = None
        for token in result.tokens[sample]:
            drawn.append(token)
            finish = _ends(seq, token, index + len(drawn))
            if finish:
                break
        if index == 0:
            self._timeline.drew(seq)
        seq.tokens += drawn
        seq.pending -= 1
        self._timeline.stats.output_tokens += len(drawn)
        if sample in result.errors:
            event = self._sequences.finish(seq, FinishReason.ERROR, f"the grammar failed: {result.errors[sample]}")
            event.error = InputError.__name__
        elif finish or sample in result.ended:
            event = self._sequences.finish(seq, finish or FinishReason.STOP)
        else:
            event = TokenEvent(seq.request.id, seq.branch, index, drawn)
        event.index, event.tokens, event.cached = index, drawn, max(0, seq.cached)
        event.blended, event.evicted = seq.log.blended, seq.log.evicted
        seq.unsent = max(0, len(drawn) - 1 - accepted)
        if offered or seq.unsent:
            self._timeline.forced(seq, seq.unsent)
            event.forced, event.drafted, event.accepted = seq.unsent, offered, accepted
        if sample in result.logprobs:
            event.logprobs = result.logprobs[sample][: len(drawn)]
        if index == 0 and seq.scores:
            event.prompt_logprobs = seq.scores
        return event

    def _settle(self, seq: Sequence, offered: int, accepted: int) -> tuple[int, int]:
        """A step with guesses is over: KV is there as far as they were right, and pages beyond that go back."""
        if seq.acceptance is not None:
            seq.acceptance.learn(seq.drafts, offered, accepted)
        self._timeline.guessed(seq, offered, accepted)
        seq.computed += accepted
        if not self._memory.contiguous:
            self._memory.trim(seq.table, seq.computed)
        return offered, accepted

    def _branch(self, seq: Sequence, options: TokenLogprobs) -> list[TokenEvent]:
        """A beam's options are known; once all are, its search goes a step on, or is over."""
        request, sequences = seq.request, self._sequences
        search = sequences.searches[request.id]
        seq.pending -= 1
        if not search.learn(seq, options):
            return []
        if seq is search.root and not seq.outputs:
            self._timeline.drew(seq)
        for old in search.advance(sequences.fork):
            sequences.retire(old)
        if search.live:
            return []
        found = answers(request, search.results(request.params.n), max(0, seq.cached))
        self._timeline.stats.output_tokens += sum(len(event.tokens) for event in found)
        self._timeline.ended(search.root, FinishReason.STOP)
        del sequences.searches[request.id], sequences.requests[request.id]
        return found

    def _pool(self, seq: Sequence, row: Row, vector: list[float]) -> list[TokenEvent]:
        """Add hidden states of a part of the prompt; with the last part the request is answered."""
        seq.pooled = [a + b for a, b in zip(seq.pooled, vector, strict=True)] if seq.pooled else vector
        if row.start + row.count < seq.prompt_len:
            return []
        event = self._sequences.finish(seq, FinishReason.STOP)
        event.embedding = [x / seq.prompt_len for x in seq.pooled] if row.pool == "mean" else seq.pooled
        return [event]


def _ends(seq: Sequence, token: int, outputs: int) -> FinishReason | None:
    request, params = seq.request, seq.request.params
    if outputs >= params.min_tokens and (
        token in params.stop_token_ids or (token in request.eos_token_ids and not params.ignore_eos)
    ):
        return FinishReason.STOP
    return FinishReason.LENGTH if seq.prompt_len + outputs >= seq.limit else None
