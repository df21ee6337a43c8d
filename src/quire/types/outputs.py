"""Results as users see them: text, token ids, log-probabilities, reasons."""

from __future__ import annotations

import msgspec

from quire.types.counts import Counts, added
from quire.types.plan import TokenLogprobs
from quire.types.request import FinishReason


class Counted:
    """The counters by the names that callers know."""

    __slots__ = ()
    counts: Counts | None

    @property
    def cached_tokens(self) -> int:
        return self.counts.cached if self.counts else 0

    @property
    def blended_tokens(self) -> int:
        """Of the prompt, reused from another place."""
        return self.counts.blended if self.counts else 0

    @property
    def evicted_tokens(self) -> int:
        """Whose KV was dropped so far, to keep a budget."""
        return self.counts.evicted if self.counts else 0

    @property
    def forced_tokens(self) -> int:
        """Of these tokens, how many a grammar forced."""
        return self.counts.forced if self.counts else 0

    @property
    def drafted_tokens(self) -> int:
        """Drafted on the way to these tokens."""
        return self.counts.drafted if self.counts else 0

    @property
    def accepted_tokens(self) -> int:
        """Of those drafted, right: steps saved."""
        return self.counts.accepted if self.counts else 0


class Delta(msgspec.Struct, Counted, kw_only=True, gc=False):
    """One step forward of one branch; what a streaming caller receives."""

    branch: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first delta, if asked for
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    counts: Counts | None = None
    score: float | None = None  # of an answer that beam search found

    def extend(self, later: Delta) -> None:
        """Take in a later delta of the same branch."""
        self.text += later.text
        self.token_ids = self.token_ids + later.token_ids
        self.logprobs = _joined(self.logprobs, later.logprobs)
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish_reason, self.stop_reason, self.score = later.finish_reason, later.stop_reason, later.score
        self.counts = added(self.counts, later.counts)


def _joined(first: list[TokenLogprobs] | None, second: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
    return first + second if first and second else first or second


class CompletionOutput(msgspec.Struct, Counted, kw_only=True):
    """One answer, added up delta by delta; its text is joined by whoever reads it."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    counts: Counts | None = None
    score: float | None = None  # beam search: log-probability, penalised by length

    def add(self, delta: Delta) -> None:
        """All of a delta but its text."""
        self.token_ids += delta.token_ids
        if delta.logprobs:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(p.logprob for p in delta.logprobs)
        if delta.counts is not None:
            self.counts = added(self.counts, delta.counts)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason, self.score = delta.finish_reason, delta.stop_reason, delta.score

    @property
    def likelihood(self) -> float:
        """Mean log-probability of its tokens, where those were asked for."""
        return (self.cumulative_logprob or 0.0) / max(1, len(self.token_ids))


class RequestTimes(msgspec.Struct, kw_only=True):
    """Seconds on the client's monotonic clock."""

    submitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    token_times: list[float] = []  # of branch 0, one per token


class RequestOutput(msgspec.Struct, kw_only=True):
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs] | None = None
    times: RequestTimes = msgspec.field(default_factory=RequestTimes)

    @property
    def cached_tokens(self) -> int:
        return max((output.cached_tokens for output in self.outputs), default=0)

    @property
    def blended_tokens(self) -> int:
        """Of the prompt, those of chunks that were cached for another place."""
        return max((output.blended_tokens for output in self.outputs), default=0)
