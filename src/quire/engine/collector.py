"""Deltas gathered into a whole RequestOutput, with the times that matter."""

from __future__ import annotations

import time

from quire.types.outputs import CompletionOutput, Delta, RequestOutput
from quire.types.request import Request


class Collector:
    def __init__(self, request: Request, prompt: str | None):
        n = request.params.n
        self.output = RequestOutput(
            request_id=request.id,
            prompt=prompt,
            prompt_token_ids=request.prompt,
            outputs=[CompletionOutput(index=i, token_ids=[]) for i in range(n)],
        )
        self._keep = request.keep
        self.output.times.submitted = time.perf_counter()
        self._texts: list[list[str]] = [[] for _ in range(n)]

    def add(self, delta: Delta) -> None:
        now = time.perf_counter()
        result, out, times = self.output, self.output.outputs[delta.branch], self.output.times
        out.token_ids += delta.token_ids
        out.forced_tokens += delta.forced_tokens
        out.drafted_tokens += delta.drafted_tokens
        out.accepted_tokens += delta.accepted_tokens
        out.evicted_tokens = max(out.evicted_tokens, delta.evicted_tokens)
        self._texts[delta.branch].append(delta.text)
        if delta.logprobs:
            out.logprobs = (out.logprobs or []) + delta.logprobs
            out.cumulative_logprob = (out.cumulative_logprob or 0.0) + sum(p.logprob for p in delta.logprobs)
        if delta.prompt_logprobs is not None:
            result.prompt_logprobs = delta.prompt_logprobs
        result.cached_tokens = max(result.cached_tokens, delta.cached_tokens)
        result.blended_tokens = max(result.blended_tokens, delta.blended_tokens)
        times.first_token = times.first_token or now
        if delta.branch == 0:
            times.token_times += [now] * len(delta.token_ids)
        if delta.finish_reason:
            out.finish_reason, out.stop_reason = delta.finish_reason, delta.stop_reason
            out.score = delta.score
            out.text = "".join(self._texts[delta.branch])
            times.finished = now

    def result(self) -> RequestOutput:
        """The output, once all branches finished; of more branches than are wanted, the likeliest."""
        if self._keep:
            outputs = sorted(self.output.outputs, key=_likelihood, reverse=True)[: self._keep]
            for index, output in enumerate(outputs):
                output.index = index
            self.output.outputs = outputs
        return self.output


def _likelihood(output: CompletionOutput) -> float:
    """Mean log-probability of its tokens."""
    return (output.cumulative_logprob or 0.0) / max(1, len(output.token_ids))
