"""The model runner: one plan in, drawn tokens and log-probabilities out.

Nothing here waits for the device; results are copied to the host in the background and read by the ticket.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from quire.generation import LogprobTensors, Sampled, Sampler, score
from quire.model import KVViews, Model
from quire.runtime.slots import SlotState
from quire.types.kv import KVLayout
from quire.types.plan import Capacity, StepPlan, StepResult, TokenLogprobs

SCORE_SLICE = 64  # rows of logits held at once for prompt log-probabilities


class ModelRunner:
    def __init__(self, model: Model, layout: KVLayout, capacity: Capacity, device: torch.device, dtype: torch.dtype):
        self.model = model
        self._device = device
        self._pool = torch.zeros(capacity.pages, layout.page_elements, dtype=dtype, device=device)
        self._kv = KVViews(self._pool, layout)
        self._slots = SlotState(layout, capacity, device)
        self._tops = [0] * capacity.slots  # how many alternatives each slot's prompt log-probabilities list
        self._sampler = Sampler(slots=capacity.slots, vocab_size=model.spec.vocab_size, device=device)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> PendingStep:
        began = time.perf_counter()
        for admit in plan.admits:
            self._sampler.admit(admit)
            self._tops[admit.slot] = admit.params.prompt_logprobs or 0
        self._slots.apply(plan)
        if plan.copies:
            pairs = self._slots.upload(np.array(plan.copies, dtype=np.int64).T.copy())
            self._pool[pairs[1]] = self._pool[pairs[0]]  # reads all sources before it writes
        input_ids, batch = self._slots.batch(plan)
        hidden = self.model.forward(input_ids, batch, self._kv)  # [tokens, hidden]
        scores = self._score(plan, hidden)
        sampled = self._sample(plan, hidden) if plan.samples else None
        return PendingStep(plan, sampled, scores, began, self._device)

    def _sample(self, plan: StepPlan, hidden: torch.Tensor) -> Sampled:
        last, end = [], 0
        for row in plan.rows:
            end += row.count
            last.append(end - 1)
        index = self._slots.upload(np.array([last[s.row] for s in plan.samples], dtype=np.int64))
        logits = self.model.logits(hidden[index])
        slots, positions = [s.slot for s in plan.samples], [s.position for s in plan.samples]
        sampled = self._sampler.sample(logits, slots, positions, self._slots.tokens)
        self._slots.store(plan, sampled.token_ids)
        return sampled

    def _score(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, list[LogprobTensors]]:
        """Log-probability of the known token after each position of rows that ask for it."""
        found: dict[int, list[LogprobTensors]] = {}
        end = 0
        for i, row in enumerate(plan.rows):
            begin, end = end, end + row.count
            if not row.score:
                continue
            following = self._slots.tokens[row.slot, row.start + 1 : row.start + row.count + 1].long()
            count = following.shape[0]
            found[i] = [
                score(self.model.logits(hidden[begin + a : begin + min(a + SCORE_SLICE, count)]),
                      following[a : a + SCORE_SLICE], self._tops[row.slot])
                for a in range(0, count, SCORE_SLICE)
            ]  # fmt: skip
        return found


class PendingStep:
    """A step whose results are on their way to the host."""

    def __init__(
        self,
        plan: StepPlan,
        sampled: Sampled | None,
        scores: dict[int, list[LogprobTensors]],
        began: float,
        device: torch.device,
    ):
        self._plan = plan
        self._sampled = sampled
        self._scores = scores
        self._began = began
        self._event: Any = None
        self._tokens: torch.Tensor | None = None
        if sampled is not None:
            self._tokens = sampled.token_ids
            if device.type == "cuda":
                self._tokens = self._tokens.to("cpu", non_blocking=True)
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        tokens = [[t] for t in self._tokens.tolist()] if self._tokens is not None else []
        logprobs: dict[int, TokenLogprobs] = {}
        if self._sampled is not None:
            logprobs = {i: found for i, found in enumerate(self._sampled.to_host()) if found is not None}
        return StepResult(
            step=self._plan.step,
            tokens=tokens,
            logprobs=logprobs,
            scores={i: [entry for part in parts for entry in part.to_host()] for i, parts in self._scores.items()},
            seconds=time.perf_counter() - self._began,
        )
