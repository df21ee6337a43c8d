"""Tokens to text: per branch an incremental detokenizer and a stop matcher.

Stop strings are found here, where text is made; the engine is then told where the branch ended.
"""

from __future__ import annotations

from msgspec.structs import replace

from quire.text import IncrementalDetokenizer, StopMatcher, TextModel
from quire.types.counts import Counts
from quire.types.errors import EngineDeadError, from_wire
from quire.types.events import TokenEvent
from quire.types.outputs import Delta
from quire.types.request import FinishReason, Request


def pooled_in(event: TokenEvent) -> list[float]:
    """The pooled hidden state, or the scores of classes, that an event carries."""
    if event.finish is FinishReason.ERROR:
        raise from_wire(event.error, event.message)
    if event.embedding is None:
        raise EngineDeadError("the request ended without an embedding: it was cancelled")
    return event.embedding


class _Branch:
    def __init__(self, request: Request, text: TextModel):
        params = request.params
        self.received = len(request.outputs)
        self.done = False
        self.include_stop = params.include_stop
        self.min_tokens = params.min_tokens
        self.stop_ids = set(params.stop_token_ids)
        self.end_ids = self.stop_ids.union(request.eos_token_ids)
        self.decoder = IncrementalDetokenizer(text.tokenizer, request.prompt, params.skip_special_tokens)
        self.push = self.decoder.push
        self.stops = StopMatcher(params.stop, params.include_stop) if params.stop else None
        if request.outputs:  # what another engine drew is out already; what it held back is held back here
            for count, token in enumerate(request.outputs, 1):
                said = self.push([token])
                if self.stops is not None:
                    self.stops.push(said, early=count <= self.min_tokens)


class RequestText:
    """The text side of one request. `take` turns an engine event into what the caller sees."""

    def __init__(self, request: Request, text: TextModel):
        self.request = request
        self._branches = {number: _Branch(request, text) for number in request.branches}
        self.open = request.params.n  # branches that have not ended

    def take(self, event: TokenEvent) -> tuple[Delta | None, int | None]:
        """(what to hand on, where to end the branch if a stop string matched); events after the end are dropped."""
        branch = self._branches[event.branch]
        if branch.done:
            return None, None
        if (delta := self.plain(event)) is not None:
            return delta, None
        if event.finish is FinishReason.ERROR:
            raise from_wire(event.error, event.message)
        return self._end_or_stop(branch, event)

    def plain(self, event: TokenEvent) -> Delta | None:
        """What an event says that ends nothing, as nearly all do; None if `take` must have a look at it."""
        branch = self._branches[event.branch]
        if event.finish is not None or branch.stops is not None or event.index != branch.received or branch.done:
            return None
        branch.received += len(event.tokens)
        return Delta(
            branch=event.branch,
            text=branch.push(event.tokens),
            token_ids=event.tokens,
            logprobs=event.logprobs,
            prompt_logprobs=event.prompt_logprobs,
            counts=event.counts,
        )

    def _end_or_stop(self, branch: _Branch, event: TokenEvent) -> tuple[Delta, int | None]:
        """An event that repeats tokens, ends its branch, or may hold a stop string."""
        fresh = max(0, branch.received - event.index)  # a repeat of tokens we have
        tokens, logprobs = event.tokens[fresh:], event.logprobs
        matched = None
        pieces: list[str] = []
        used = 0
        # Ended by a token that is no text, rather than by a grammar's last one.
        ended = event.finish is FinishReason.STOP and bool(tokens) and tokens[-1] in branch.end_ids
        silent = ended and not branch.include_stop
        for token in tokens:
            used += 1
            piece = "" if silent and used == len(tokens) else branch.push([token])
            if branch.stops is not None:
                early = branch.received + used <= branch.min_tokens
                piece, matched = branch.stops.push(piece, early=early)
            pieces.append(piece)
            if matched is not None:
                break
        branch.received += used
        finish = FinishReason.STOP if matched is not None else event.finish
        if finish and matched is None:
            pieces.append(self._flush(branch))
        stop_reason: str | int | None = matched
        if finish and matched is None and tokens and tokens[-1] in branch.stop_ids:
            stop_reason = tokens[-1]
        if finish:
            branch.done = True
            self.open -= 1
        delta = Delta(
            branch=event.branch,
            text="".join(pieces),
            token_ids=tokens[:used],
            logprobs=logprobs[fresh : fresh + used] if logprobs else None,
            prompt_logprobs=event.prompt_logprobs,
            finish_reason=finish,
            stop_reason=stop_reason,
            counts=_counts_until(event, fresh + used),
            score=event.score,
        )
        return delta, branch.received if matched is not None and event.finish is None else None

    def _flush(self, branch: _Branch) -> str:
        rest = branch.decoder.flush()
        if branch.stops is None:
            return rest
        emitted, _ = branch.stops.push(rest, early=branch.received <= branch.min_tokens)
        return emitted + branch.stops.flush()


def _counts_until(event: TokenEvent, end: int) -> Counts | None:
    """Of an event whose tokens from index `end` on are not the answer's."""
    if event.counts is None or not event.forced:
        return event.counts
    return replace(event.counts, forced=sum(index < end for index in event.forced))
