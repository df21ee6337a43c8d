"""Results as users see them: text, token ids, log-probabilities, reasons."""

from __future__ import annotations

import msgspec

from quire.types.plan import TokenLogprobs
from quire.types.request import FinishReason


class Delta(msgspec.Struct, kw_only=True):
    """One step forward of one branch; what a streaming caller receives."""

    branch: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first delta, if asked for
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    cached_tokens: int = 0
    blended_tokens: int = 0  # of the prompt, reused from another place
    forced_tokens: int = 0  # of these tokens, how many a grammar forced
    score: float | None = None  # of an answer that beam search found
    drafted_tokens: int = 0  # drafted on the way to these tokens
    accepted_tokens: int = 0  # ... of them, right
    evicted_tokens: int = 0  # whose KV was dropped so far, to keep a budget


class CompletionOutput(msgspec.Struct, kw_only=True):
    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    forced_tokens: int = 0
    score: float | None = None  # beam search: log-probability, penalised by length
    drafted_tokens: int = 0  # drafted
    accepted_tokens: int = 0  # ... of them, right: steps saved
    evicted_tokens: int = 0  # of prompt and answer: KV was dropped to keep a budget


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
    cached_tokens: int = 0
    blended_tokens: int = 0  # of the prompt, those of chunks that were cached for another place
    times: RequestTimes = msgspec.field(default_factory=RequestTimes)
