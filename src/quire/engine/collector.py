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
        out, times = self.output.outputs[delta.branch], self.output.times
        out.add(delta)
        self._texts[delta.branch].append(delta.text)
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = delta.prompt_logprobs
        times.first_token = times.first_token or now
        if delta.branch == 0:
            times.token_times += [now] * len(delta.token_ids)
        if delta.finish_reason is not None:
            out.text = "".join(self._texts[delta.branch])
            times.finished = now

    @property
    def done(self) -> bool:
        return all(output.finish_reason is not None for output in self.output.outputs)

    def result(self) -> RequestOutput:
        """The output, once all branches finished; of more branches than are wanted, the likeliest."""
        if self._keep:
            outputs = sorted(self.output.outputs, key=lambda output: output.likelihood, reverse=True)[: self._keep]
            for index, output in enumerate(outputs):
                output.index = index
            self.output.outputs = outputs
        return self.output
