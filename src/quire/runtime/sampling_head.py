"""The sampling head, on rank 0: logits to tokens, with grammars, drafts and their verification, log-probabilities.

    plan ──► expand: drafts, grammar masks begun ──► (the worker's forward pass) ──► sample ──► accept, on the host

Nothing before `accept` waits for the device. Refuses to know: models, captured steps, pages.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field

import torch

from quire.generation.drafting.speculation import ExpandedPlan, Speculation
from quire.generation.grammar.grammar_store import GrammarStore
from quire.generation.grammar.slot_grammars import Accepted, Accepting, SlotGrammars
from quire.generation.sampling.logprobs import LogprobTensors
from quire.generation.sampling.sampler import Sampled, Sampler
from quire.runtime.worker import ForwardOutput, ForwardWorker
from quire.types.plan import Sample, StepPlan, StepResult
from quire.types.seams import DraftTree


@dataclass
class StepSamples:
    """What a step's logits came to, on the device."""

    sampled: Sampled | None
    scores: dict[int, list[LogprobTensors]] = field(default_factory=dict)  # by row: prompt log-probabilities


@dataclass(eq=False)
class AcceptedSample:
    """A sample whose draft was verified, and whose grammar may have still to say what follows."""

    index: int  # among the samples of the plan as it was made
    sample: Sample
    tokens: list[int]
    indices: list[int]  # of those among all that the step sampled
    states: torch.Tensor | None
    drafted: bool  # whether there was a draft to verify
    accepting: Accepting | None = None  # None: no grammar

    @property
    def known(self) -> bool:
        return self.accepting is None or self.accepting.known


class SamplingHead:
    def __init__(
        self,
        worker: ForwardWorker,
        grammars: GrammarStore,
        speculation: Speculation | None = None,
        *,
        graphs: bool = False,
    ):
        """For the logits of this worker, and over its slots. `graphs`: whether anything may be captured."""
        model, capacity = worker.model, worker.capacity
        self.device = worker.device
        self._worker = worker
        self._prompt_logprobs = [0] * capacity.slots  # how many alternatives each slot's list
        self._sampler = Sampler(
            slots=capacity.slots,
            vocab_size=model.spec.vocab_size,
            device=worker.device,
            native=model.sampling,
            graphs=graphs,
        )
        worker.draw_with(self._sampler.draw)
        self._grammars = SlotGrammars(grammars, vocab_size=model.spec.vocab_size, max_len=capacity.max_model_len)
        self._deferred: list[tuple[list[AcceptedSample], Callable[[list[AcceptedSample]], StepResult]]] = []
        self.speculate(speculation)

    def speculate(self, speculation: Speculation | None) -> None:
        """Draft with this from now on."""
        self._speculation = speculation
        self._worker.tap_hidden_states(speculation.hidden_layers if speculation is not None else None)

    @torch.inference_mode()
    def warm_up(self) -> None:
        self._sampler.warm_up()

    def close(self) -> None:
        self._deferred.clear()
        self._grammars.close()

    def expand(self, plan: StepPlan) -> ExpandedPlan:
        """Follow the plan's changes of slots, lay out drafts, and begin the grammar masks that `sample` will need."""
        expanded = ExpandedPlan.without_drafts(plan) if self._speculation is None else self._speculation.expand(plan)
        for admit in plan.admits:
            self._sampler.admit(admit)
            self._prompt_logprobs[admit.slot] = admit.params.prompt_logprobs or 0
        self._grammars.apply(plan.frees, plan.admits)
        chains = [(s.slot, draft) for s, draft, _ in expanded.samples() if not isinstance(draft, DraftTree)]
        self._grammars.begin_masks(chains)
        return expanded

    def captured(self, plan: StepPlan) -> bool:
        """Whether a captured step may draw every sample: one a row, and nothing but a draw."""
        samples = plan.samples
        if len({s.row for s in samples}) < len(samples):
            return False
        return self._sampler.captured([s.slot for s in samples], [s.position for s in samples])

    def sample(self, expanded: ExpandedPlan, output: ForwardOutput) -> StepSamples:
        """Samples are stored in their slots, unread by the host."""
        scores = self._score(expanded.plan, output)  # first: it reads the slots before samples are stored there
        if output.drawn is not None:
            return StepSamples(Sampled(output.drawn), scores)
        if output.logits is None:
            return StepSamples(None, scores)
        plan, worker = expanded.plan, self._worker
        slots, positions = [s.slot for s in plan.samples], [s.position for s in plan.samples]
        sampled = self._sampler.sample(output.logits, slots, positions, worker.slots.tokens, self._grammars.masks())
        worker.store(slots, positions, sampled.token_ids)
        return StepSamples(sampled, scores)

    def _score(self, plan: StepPlan, output: ForwardOutput) -> dict[int, list[LogprobTensors]]:
        """By row with `score`: log-probabilities of the known token after each position."""
        scores: dict[int, list[LogprobTensors]] = {i: [] for i, row in enumerate(plan.rows) if row.score}
        for part in output.prompt_logits:
            top = self._prompt_logprobs[part.slot]
            scores[part.row].append(self._sampler.score(part.logits, part.next_tokens, top))
        return scores

    def accept(self, expanded: ExpandedPlan, sampled: list[int], hidden: torch.Tensor | None) -> list[AcceptedSample]:
        """By sample of the original plan: the tokens that its draft and its grammar let stand, once that is known.
        `hidden`: states they were sampled from, for the proposer."""
        found, end = [], 0
        for index, (sample, draft, count) in enumerate(expanded.samples()):
            begin, end = end, end + count
            tokens, indices = sampled[begin:end], [0]
            if draft:
                assert self._speculation is not None
                tokens, indices = self._speculation.accept(draft, tokens)
                if isinstance(draft, DraftTree):
                    self._worker.keep_branch(sample.slot, sample.position, tokens, [i - 1 for i in indices[1:]])
            states = None
            if hidden is not None and self._speculation is not None:
                states = hidden[[begin + i for i in indices] if isinstance(draft, DraftTree) else slice(begin, end)]
            places = [begin + i for i in indices]
            found.append(AcceptedSample(index, sample, tokens, places, states, drafted=bool(draft)))
        accepting = self._grammars.accept([(one.sample.slot, one.sample.position, one.tokens) for one in found])
        for one, its in zip(found, accepting, strict=True):
            one.accepting = its
        return found

    def observe(self, one: AcceptedSample) -> Accepted:
        """What became of a sample that is known now; the proposer is told."""
        accepted = one.accepting.result() if one.accepting is not None else Accepted(one.tokens, len(one.tokens))
        if one.drafted:
            self._worker.keep_state(one.sample.slot, accepted.sampled - 1)
        if self._speculation is not None:
            states = one.states[: accepted.sampled] if one.states is not None else None
            self._speculation.observe(one.sample.slot, one.sample.position, accepted.tokens, states)
        return accepted

    def defer(self, waiting: list[AcceptedSample], tell: Callable[[list[AcceptedSample]], StepResult]) -> None:
        """Samples of a step that are not known yet; `tell` makes a result of those that are, later."""
        self._deferred.append((waiting, tell))

    def late(self, patience: float) -> list[StepResult]:
        """Of earlier steps, samples that became known; waits so long for the first, if there are any."""
        if not self._deferred:
            return []
        deferred = [one for waiting, _ in self._deferred for one in waiting]
        wait({one.accepting.task for one in deferred if one.accepting}, patience, FIRST_COMPLETED)
        found, left = [], []
        for waiting, tell in self._deferred:
            known = [one for one in waiting if one.known]
            if known:
                found.append(tell(known))
            if len(known) < len(waiting):
                left.append(([one for one in waiting if one not in known], tell))
        self._deferred = left
        return found
