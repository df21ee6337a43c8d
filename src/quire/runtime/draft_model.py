"""A draft model: a worker and a sampling head of its own, over pages of its own, run by the same kind of plans.

It samples with the sequence's own parameters and noise, so where both models' logits are close they sample the same.
Its KV follows the sequence: accepted draft tokens are computed already, the others are written over. A sequence for
which there are no pages is not drafted for.

Refuses to know: the target, what becomes of its drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from quire.runtime.sampling_head import SamplingHead
from quire.runtime.step_result import run_step
from quire.runtime.worker import ForwardWorker
from quire.types.kv import KVLayout
from quire.types.plan import Admit, PageDelta, Row, Sample, StepPlan, Write
from quire.types.seams import DraftContext


@dataclass
class _State:
    computed: list[int]  # tokens whose K and V are in the pages
    pages: list[list[int]] = field(default_factory=list)  # by group


class DraftModelProposer:
    def __init__(self, worker: ForwardWorker, head: SamplingHead, layout: KVLayout):
        capacity = worker.capacity
        self._worker = worker
        self._head = head
        self._sizes = [group.tokens_per_page for group in layout.groups]
        self._free = list(range(capacity.pages - 1, 0, -1))
        self._chunk = capacity.max_batch_tokens
        self._length = capacity.max_model_len

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[list[int]]:
        plan = StepPlan(step=0)
        served = []
        for context, budget in zip(contexts, budgets, strict=True):
            most = min(budget, self._length - len(context.tokens) - 1)
            if most > 0 and self._prepare(plan, context, len(context.tokens) + most):
                served.append((context, most))
        drafts = self._sample(plan, served) if served else {}
        return [drafts.get(context.slot, []) for context in contexts]

    def observe(self, context: DraftContext, tokens: Sequence[int]) -> None:
        pass  # `propose` compares

    def forget(self, context: DraftContext) -> None:
        if context.state is not None:
            self._free += [page for pages in context.state.pages for page in pages]
            context.state = None

    def _prepare(self, plan: StepPlan, context: DraftContext, length: int) -> bool:
        """Pages for `length` tokens, and the slot's tokens as the sequence now has them; False if pages lack."""
        state = context.state
        held = [len(pages) for pages in state.pages] if state else [0] * len(self._sizes)
        missing = [max(0, -(-length // size) - have) for size, have in zip(self._sizes, held, strict=True)]
        if sum(missing) > len(self._free):
            return False
        if state is None:
            state = context.state = _State([], [[] for _ in self._sizes])
            plan.admits.append(_without_extras(context.admit, context.tokens))
        for group, count in enumerate(missing):
            if count:
                taken, self._free = self._free[-count:], self._free[:-count]
                plan.deltas.append(PageDelta(context.slot, group, held[group], taken))
                state.pages[group] += taken
        valid = 0
        for computed, known in zip(state.computed, context.tokens[:-1], strict=False):
            if computed != known:
                break
            valid += 1
        del state.computed[valid:]
        plan.writes.append(Write(context.slot, valid, context.tokens[valid:]))
        return True

    def _sample(self, plan: StepPlan, served: list[tuple[DraftContext, int]]) -> dict[int, list[int]]:
        """Prefill what is missing, then decode token by token; values are read when all steps are in flight."""
        while any(len(c.tokens) - len(c.state.computed) > self._chunk for c, _ in served):
            self._prefill_chunk(plan, served)
            plan = StepPlan(step=0)
        steps = []
        for i in range(max(most for _, most in served)):
            for context, most in served:
                if i < most:
                    known, start = len(context.tokens) + i, len(context.state.computed) if i == 0 else -1
                    plan.samples.append(Sample(len(plan.rows), context.slot, known))
                    plan.rows.append(Row(context.slot, known - 1 if i else start, 1 if i else known - start))
            steps.append((plan, run_step(plan, self._worker, self._head)))
            plan = StepPlan(step=0)
        drafts: dict[int, list[int]] = {}
        for done, pending in steps:
            for sample, tokens in zip(done.samples, pending.result().tokens, strict=True):
                drafts.setdefault(sample.slot, []).append(tokens[0])
        for context, _ in served:
            context.state.computed = context.tokens + drafts[context.slot][:-1]
        return drafts

    def _prefill_chunk(self, plan: StepPlan, served: list[tuple[DraftContext, int]]) -> None:
        """One chunk of each sequence that lacks more than one."""
        for context, _ in served:
            start = len(context.state.computed)
            if len(context.tokens) - start > self._chunk:
                plan.rows.append(Row(context.slot, start, self._chunk))
                context.state.computed = context.tokens[: start + self._chunk]
        run_step(plan, self._worker, self._head).result()  # so that only a draft's steps are ever in flight together


def _without_extras(admit: Admit, tokens: list[int]) -> Admit:
    """The same samples, with no log-probabilities or grammar; adapters are the target's."""
    params = replace(admit.params, logprobs=None, prompt_logprobs=None, grammar=None)
    return replace(admit, tokens=list(tokens), params=params, adapter=0)
