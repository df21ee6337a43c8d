"""The sampling head, on rank 0: logits to tokens, with grammars, drafts and their verification, log-probabilities.

    plan ──► expand: drafts, grammar masks begun ──► (the worker's forward pass) ──► sample ──► accept, on the host
                                                     (that of the next step) ──► draw_late ◄──┘

Nothing before `accept` waits for the device. Refuses to know: models, captured steps, pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from quire.generation.drafting.speculation import ExpandedPlan, Speculation
from quire.generation.grammar.grammar_store import GrammarStore
from quire.generation.grammar.slot_grammars import Accepted, Accepting, SlotGrammars
from quire.generation.sampling.logprobs import LogprobTensors
from quire.generation.sampling.sampler import Sampled, Sampler
from quire.runtime.late_draws import DrawnTokens, LateDraws, LateSample, StepSamples
from quire.runtime.worker import ForwardOutput, ForwardWorker
from quire.types.grammar import TokenMasks
from quire.types.plan import Sample, StepPlan, StepResult
from quire.types.seams import DraftTree


@dataclass(eq=False)
class AcceptedSample:
    """A sample whose draft was verified, if it was drawn, and whose grammar may have still to say what follows."""

    index: int  # among the samples of the plan as it was made
    sample: Sample
    tokens: list[int]
    indices: list[int]  # of those among all that the step sampled
    states: torch.Tensor | None
    drafted: bool  # whether there was a draft to verify
    late: LateSample | None = None  # until it is drawn
    accepting: Accepting | None = None  # None: no grammar

    @property
    def known(self) -> bool:
        if self.late is not None:
            return self.late.void
        return self.accepting is None or self.accepting.known


def by_known(samples: list[AcceptedSample]) -> tuple[list[AcceptedSample], list[AcceptedSample]]:
    """Those that are known, and the others. Each is asked once: threads are at it."""
    known: list[AcceptedSample] = []
    rest: list[AcceptedSample] = []
    for one in samples:
        (known if one.known else rest).append(one)
    return known, rest


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
        self._late = LateDraws()
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
        self._late = LateDraws()
        self._grammars.close()

    def expand(self, plan: StepPlan) -> ExpandedPlan:
        """Follow the plan's changes of slots, lay out drafts, and begin the grammar masks that `sample` will need."""
        expanded = ExpandedPlan.without_drafts(plan) if self._speculation is None else self._speculation.expand(plan)
        for admit in plan.admits:
            self._sampler.admit(admit)
            self._prompt_logprobs[admit.slot] = admit.params.prompt_logprobs or 0
        self._grammars.apply(plan.frees, plan.admits)
        chains: list[tuple[int, list[int]]] = []
        late, index = set(), 0
        for sample, draft, count in expanded.samples():
            live = self._grammars.of(sample.slot)
            if live is not None and not draft and live.position != sample.position:  # its mask is for one before
                late.add(index)
            elif not isinstance(draft, DraftTree):
                chains.append((sample.slot, draft))
            index += count
        self._grammars.begin_masks(chains)
        self._late.keep()
        return replace(expanded, late=frozenset(late)) if late else expanded

    def captured(self, expanded: ExpandedPlan) -> bool:
        """Whether a captured step may draw every sample but late ones: one a row, and nothing but a draw."""
        samples, _ = expanded.split()
        if len({s.row for s in samples}) < len(samples):
            return False
        return self._sampler.captured([s.slot for s in samples], [s.position for s in samples])

    def sample(self, expanded: ExpandedPlan, output: ForwardOutput) -> StepSamples:
        """Samples are stored in their slots, unread by the host; late ones wait."""
        found = StepSamples(scores=self._score(expanded.plan, output))  # first: it reads slots before these are stored
        logits, (samples, late) = output.logits, expanded.split()
        if output.drawn is not None:
            found.drawn = DrawnTokens(Sampled(output.drawn))
        elif logits is not None and samples:
            rows = [i for i in range(len(expanded.plan.samples)) if i not in expanded.late]
            found.drawn = self._draw(self._worker.pick(logits, rows), samples, self._grammars.masks())
            logits = self._worker.pick(logits, sorted(expanded.late)) if late else None
        if late:
            assert logits is not None
            lives = [live for s in late if (live := self._grammars.of(s.slot)) is not None]
            waiting = [LateSample(s, live, row) for row, (s, live) in enumerate(zip(late, lives, strict=True))]
            found.late = dict(zip(sorted(expanded.late), waiting, strict=True))
            self._late.add(logits, waiting)
        return found

    def _draw(self, logits: torch.Tensor, samples: list[Sample], masks: Sequence[TokenMasks]) -> DrawnTokens:
        slots, positions = [s.slot for s in samples], [s.position for s in samples]
        sampled = self._sampler.sample(logits, slots, positions, self._worker.slots.tokens, masks)
        self._worker.store(slots, positions, sampled.token_ids)
        return DrawnTokens(sampled)

    def _draw_late(self, logits: torch.Tensor, late: list[LateSample]) -> DrawnTokens:
        return self._draw(logits, [one.sample for one in late], [one.grammar.grammar.mask for one in late])

    def draw_late(self) -> None:
        """Draw the samples before which all is told by now; before the next step is launched."""
        self._late.proceed(self._draw_late)

    def _score(self, plan: StepPlan, output: ForwardOutput) -> dict[int, list[LogprobTensors]]:
        """By row with `score`: log-probabilities of the known token after each position."""
        scores: dict[int, list[LogprobTensors]] = {i: [] for i, row in enumerate(plan.rows) if row.score}
        for part in output.prompt_logits:
            top = self._prompt_logprobs[part.slot]
            scores[part.row].append(self._sampler.score(part.logits, part.next_tokens, top))
        return scores

    def accept(self, expanded: ExpandedPlan, samples: StepSamples, hidden: torch.Tensor | None) -> list[AcceptedSample]:
        """By sample of the original plan: the tokens that its draft and its grammar let stand, once that is known.
        `hidden`: states they were sampled from, for the proposer."""
        found, end, sampled = [], 0, samples.tokens(len(expanded.plan.samples))
        for index, (sample, draft, count) in enumerate(expanded.samples()):
            begin, end = end, end + count
            tokens, indices = [token for token in sampled[begin:end] if token is not None], [0]
            if draft:
                assert self._speculation is not None
                tokens, indices = self._speculation.accept(draft, tokens)
                if isinstance(draft, DraftTree):
                    self._worker.keep_branch(sample.slot, sample.position, tokens, [i - 1 for i in indices[1:]])
            states = None
            if hidden is not None and self._speculation is not None:
                states = hidden[[begin + i for i in indices] if isinstance(draft, DraftTree) else slice(begin, end)]
            one = AcceptedSample(index, sample, tokens, [begin + i for i in indices], states, bool(draft))
            if not tokens:
                one.late = samples.late[begin]
            elif (live := self._grammars.of(sample.slot)) is not None:
                one.accepting = Accepting(live, sample.position, tokens)
            found.append(one)
        accepting = [one.accepting for one in found if one.accepting is not None]
        accepting += self._arrived(wait=not expanded.plan.computes)
        self._grammars.accept(accepting)
        self._grammars.settle(accepting)
        return found

    def _arrived(self, *, wait: bool) -> list[Accepting]:
        """Of samples that were drawn behind earlier steps, what their grammars are to take now."""
        found = []
        for waiting, _ in self._deferred:
            for one in waiting:
                late = one.late
                if late is not None and not late.void and late.drawn is not None and (wait or late.drawn.arrived):
                    one.tokens, one.late = [late.drawn.tokens[late.row]], None
                    one.accepting = Accepting(late.grammar, one.sample.position, one.tokens)
                    found.append(one.accepting)
        return found

    def observe(self, one: AcceptedSample) -> Accepted:
        """What became of a sample that is known now; the proposer is told."""
        if one.late is not None:
            return Accepted([], 0)
        accepted = one.accepting.told() if one.accepting is not None else Accepted(one.tokens, len(one.tokens))
        if one.drafted:
            self._worker.keep_state(one.sample.slot, accepted.sampled - 1)
        if self._speculation is not None:
            states = one.states[: accepted.sampled] if one.states is not None else None
            self._speculation.observe(one.sample.slot, one.sample.position, accepted.tokens, states)
        return accepted

    def defer(self, waiting: list[AcceptedSample], tell: Callable[[list[AcceptedSample]], StepResult]) -> None:
        """Samples of a step that are not known yet; `tell` makes a result of those that are, later."""
        self._deferred.append((waiting, tell))

    def deferred_results(self, patience: float) -> list[StepResult]:
        """Of earlier steps, samples that became known; waits so long for the first, if there are any."""
        if not self._deferred:
            return []
        deferred = [one for waiting, _ in self._deferred for one in waiting]
        self._grammars.settle([one.accepting for one in deferred if one.accepting is not None], patience)
        found, left = [], []
        for waiting, tell in self._deferred:
            known, rest = by_known(waiting)
            if known:
                found.append(tell(known))
            if rest:
                left.append((rest, tell))
        self._deferred = left
        return found
