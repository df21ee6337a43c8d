"""Draft budgets: how many tokens to draft, and whether to, from acceptance rates and measured costs.

A draft of k tokens makes a step of B rows one of up to B (1 + k), and is worth a + a² + ... + aᵏ tokens where a is the
acceptance rate. Drafting costs something at all, and something for every token. All that is measured: `a` for each
sequence, the seconds of steps with and without drafts for each size of batch. Drafting stops where it loses, and is
tried again now and then, ever more seldom and the more seldom the dearer it is; in between drafting is off, and steps
cost what they cost without a proposer.

Refuses to know: what is drafted, or by which proposer.
"""

from __future__ import annotations

from collections import deque
from itertools import combinations
from statistics import median_low

from quire.scheduling.feature import SchedulingFeature
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.sequence import Sequence
from quire.types.clock import Clock
from quire.types.plan import Capacity, StepResult
from quire.types.request import FinishReason

DECAY, SLOW_DECAY = 0.9, 0.99  # of what was seen of a sequence, and of all, with every draft
FADE_RATE = 1 / 32  # of what was seen of a sequence, with every step in which nothing is drafted for it
PRIOR_RATE = 0.7  # share of accepted drafts before the first
MAX_MEASUREMENTS = 5  # latest measurements of a kind
DRAFTED_STEPS_PER_PLAIN = 64  # steps with drafts before some without, to know what they replace
MAX_PLAIN_STEPS = 4  # of those, unless one has been timed before
TRIAL_DRAFTS = (4, 1, 4)  # tokens drafted in the steps of a trial: the difference tells the cost of a token
MIN_WAIT_STEPS, MAX_WAIT_STEPS = 32, 512  # steps without drafts between trials
MAX_TRIAL_COST = 0.01  # ... and as many more as it takes for trials to cost no more than this share of all time
WARM_UP_STEPS = 16  # steps before a trial in which a proposer sees what it will draft from


class AcceptanceRate:
    """How drafts have done, lately more than long ago."""

    __slots__ = ("_decay", "accepted", "asked", "found", "rejected")

    def __init__(self, prior: float = PRIOR_RATE, decay: float = DECAY) -> None:
        self._decay = decay
        self.accepted, self.rejected = 2 * prior, 2 * (1 - prior)
        self.asked = self.found = 1.0

    def learn(self, budget: int, drafted_tokens: int, accepted: int) -> None:
        self.accepted = self.accepted * self._decay + accepted
        self.rejected = self.rejected * self._decay + (accepted < drafted_tokens)
        self.asked = self.asked * self._decay + budget
        self.found = self.found * self._decay + drafted_tokens

    def fade(self, prior: float) -> None:
        """Nothing was drafted: what was seen counts a little less."""
        self.accepted += FADE_RATE * (2 * prior - self.accepted)
        self.rejected += FADE_RATE * (2 * (1 - prior) - self.rejected)

    @property
    def rate(self) -> float:
        """Chance that a draft is accepted, given that those before it were."""
        return self.accepted / (self.accepted + self.rejected)


class _Costs:
    """Seconds of steps over about as many rows, without drafts and with them."""

    def __init__(self) -> None:
        self.plain: deque[float] = deque(maxlen=MAX_MEASUREMENTS)
        self.drafting: deque[tuple[int, float]] = deque(maxlen=2 * MAX_MEASUREMENTS)  # tokens drafted, seconds
        self._line = 0.0, 0.0  # through those: seconds at no tokens, and for each

    def drafted(self, tokens: int, seconds: float) -> None:
        self.drafting.append((tokens, seconds))
        pairs = [(one, two) for one, two in combinations(self.drafting, 2) if one[0] != two[0]]
        slope = max(0.0, median_low((two[1] - one[1]) / (two[0] - one[0]) for one, two in pairs)) if pairs else 0.0
        base = median_low(seconds - slope * tokens for tokens, seconds in self.drafting) if pairs else 0.0
        self._line = base, slope

    def price(self) -> tuple[float, float]:
        """What drafting costs, and what a drafted token does, in plain steps; nothing until it is known."""
        if not self.plain or not self.drafting:
            return 0.0, 0.0
        plain, (base, slope) = median_low(self.plain), self._line
        if base <= plain:  # all of it is the tokens'
            each = median_low((seconds - plain) / max(0.1, tokens) for tokens, seconds in self.drafting)
            return 0.0, max(0.0, each / plain)
        return base / plain - 1, slope / plain


class Drafting(SchedulingFeature):
    """Draft budgets of running sequences; `budgets` decides, the rest is measuring."""

    def __init__(self, capacity: Capacity, clock: Clock):
        self._clock = clock
        self._rates: dict[Sequence, AcceptanceRate] = {}  # how drafts of each sequence have done
        self.unverified: set[Sequence] = set()  # whose latest row in flight has drafts
        self._most = capacity.drafts
        self._tokens = capacity.max_batch_tokens
        self._adapts = capacity.adapts
        self._all = not capacity.predicted_only
        self._predicted: set[Sequence] = set()  # whose callers have said what they expect
        self._overlapped = capacity.depth > 1
        self._costs: dict[int, _Costs] = {}
        self._general = AcceptanceRate(decay=SLOW_DECAY)  # over all sequences
        self._began: dict[int, tuple[float, int, bool]] = {}  # by step: planned at, rows, whether it drafts
        self._last = 0.0
        self._drafted = 0  # steps with drafts since one without was timed
        self._plain = 0  # steps without drafts, to time one
        self._waited = 0  # steps since drafts last paid, or were last tried
        self._wait = MIN_WAIT_STEPS
        self._tried = 0  # steps of the trial under way
        self._trying = False  # whether the latest budgets are a trial's
        self.rests = False  # nothing will be drafted for a while

    def budgets(self, running: list[Sequence]) -> dict[Sequence, int]:
        """How much to draft for which of the sequences that need one token only. Empty: a plain step is better."""
        if not self._all and not self._predicted:
            return {}
        ready = [s for s in running if s.known - s.computed == 1]
        room = min(self._most, (self._tokens - len(ready)) // max(1, len(ready)))
        able = [s for s in ready if s.outputs and not (s.request.beam or s.hook or s.request.pooling)]
        if not self._all:
            able = [s for s in able if s in self._predicted]
        if room <= 0 or not able:
            return {}
        if not self._adapts:
            return self._capped(dict.fromkeys(able, room))
        costs = self._costs.setdefault(len(ready).bit_length(), _Costs())
        self.rests = False
        if not costs.plain or self._drafted >= DRAFTED_STEPS_PER_PLAIN:
            return {}
        fixed, slope = costs.price()
        price = slope * len(ready)  # of a drafted token, in drawn ones
        budgets, gain, tokens = {}, 0.0, 0.0
        for seq in able:
            acceptance = self._rates.get(seq)
            if acceptance is None:
                acceptance = self._rates[seq] = AcceptanceRate(self._general.rate)
            rate, share = acceptance.rate, acceptance.found / acceptance.asked
            count, accepted = 0, rate
            while count < room and accepted > price:
                count, gain, accepted = count + 1, gain + accepted * share, accepted * rate
            if count:
                budgets[seq] = count
                tokens += count * share
            else:
                acceptance.fade(self._general.rate)
        self._trying = gain <= (fixed + slope * tokens) * len(ready)
        if not self._trying:
            return self._capped(budgets)
        known = len(costs.drafting) > len(TRIAL_DRAFTS)  # the first measurements are of things done for the first time
        cost = sum(fixed + slope * len(able) * min(count, room) for count in TRIAL_DRAFTS) if known else 0.0
        # Steps until drafts are tried again.
        left = 0 if self._tried else max(self._wait, cost / MAX_TRIAL_COST) - self._waited
        self.rests = left > WARM_UP_STEPS
        return self._capped(dict.fromkeys(able, min(TRIAL_DRAFTS[self._tried], room))) if left <= 0 else {}

    def _capped(self, budgets: dict[Sequence, int]) -> dict[Sequence, int]:
        """No sequence draws more tokens than it may have."""
        capped = {seq: min(count, seq.limit - seq.known - 1) for seq, count in budgets.items()}
        return {seq: count for seq, count in capped.items() if count > 0}

    def planned(self, step: PlanBuilder) -> None:
        """A step is on its way, with the latest budgets or without any."""
        plan, now = step.plan, step.now
        if not plan.rows or not (self._all or self._predicted or self.unverified):
            return
        self.unverified.difference_update(seq for seq, _ in step.rows)
        self.unverified.update(seq for row, (seq, _) in zip(plan.rows, step.rows, strict=True) if row.drafts)
        drafts = any(row.drafts for row in plan.rows)
        if all(row.count == 1 for row in plan.rows) and not plan.admits:
            self._began[plan.step] = now, len(plan.rows), drafts
        if not drafts:
            self._waited += 1
            self._plain += 1
            if self._plain >= MAX_PLAIN_STEPS:
                self._drafted = self._plain = 0
            return
        self._drafted += 1
        if self._trying:
            self._tried += 1
            if self._tried == len(TRIAL_DRAFTS):
                self._waited = self._tried = 0
                self._wait = min(2 * self._wait, MAX_WAIT_STEPS)
        else:
            self._waited = self._tried = 0
            self._wait = MIN_WAIT_STEPS

    def step_landed(self, step: PlanBuilder, result: StepResult) -> None:
        """What a step took: since it was planned, or since the one before it ended."""
        plan, now = step.plan, self._clock.now
        for i, (sample, (seq, epoch)) in enumerate(zip(plan.samples, step.samples, strict=True)):
            budget = plan.rows[sample.row].drafts
            if budget and seq.epoch == epoch and seq in self._rates:
                self._rates[seq].learn(budget, *result.drafts.get(i, (0, 0)))
        before, self._last = self._last, now
        if plan.step not in self._began:
            return
        planned, rows, drafts = self._began.pop(plan.step)
        seconds = now - max(planned, before)
        drafted_tokens = sum(count for count, _ in result.drafts.values())
        for count, accepted in result.drafts.values():
            self._general.learn(count, count, accepted)
        if seconds <= 0 or (drafts and not drafted_tokens and not self._overlapped):
            return  # no clock; or a step like any other, only that a proposer was asked
        costs = self._costs.setdefault(rows.bit_length(), _Costs())
        if drafts:
            costs.drafted(drafted_tokens, seconds)
        elif not costs.plain or not self._overlapped or planned < before:
            costs.plain.append(seconds)  # one that nothing ran beside is slower than they are when it counts
            self._drafted = self._plain = 0

    def arrived(self, seq: Sequence) -> None:
        if seq.request.prediction:
            self._predicted.add(seq)

    def preempted(self, seq: Sequence) -> None:
        self.unverified.discard(seq)

    def finished(self, seq: Sequence, reason: FinishReason | None) -> None:
        self.unverified.discard(seq)
        self._predicted.discard(seq)
        self._rates.pop(seq, None)
