"""How many tokens to guess ahead, and whether to: from how often guesses were right, and what they cost.

A guess of k tokens makes a step of B rows one of up to B (1 + k), and is worth a + a² + ... + aᵏ tokens where a is the
share of guesses that were right. It costs something to guess at all, and something for every token guessed. All that is
measured: `a` for each sequence, the seconds of steps with and without guesses for each size of batch. Guessing stops
where it loses, and is tried again now and then, ever more seldom and the more seldom the dearer it is; in between it
rests, and steps cost what they cost without anybody who guesses.

Refuses to know: what is guessed, or by whom.
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

DECAY, SLOW_DECAY = 0.9, 0.99  # of what was seen of a sequence, and of all, with every guess
FADING = 1 / 32  # of what was seen of a sequence, with every step in which nothing is guessed for it
PRIOR = 0.7  # share of right guesses before the first
KEPT = 5  # latest measurements of a kind
PLAIN_EVERY = 64  # steps with guesses before some without, to know what they replace
PLAIN_MOST = 4  # of those, unless one has been timed before
TRIAL = (4, 1, 4)  # tokens guessed in the steps of a trial: the difference tells what guessing costs, and what a token
FIRST_WAIT, LONGEST_WAIT = 32, 512  # steps without guesses between trials
LOSS = 0.01  # ... and as many more as it takes for trials to cost no more than this share of all time
WARM = 16  # steps before a trial in which a proposer sees what it will guess from


class AcceptanceRate:
    """How guesses have done, lately more than long ago."""

    __slots__ = ("_decay", "asked", "found", "right", "wrong")

    def __init__(self, prior: float = PRIOR, decay: float = DECAY) -> None:
        self._decay = decay
        self.right, self.wrong = 2 * prior, 2 * (1 - prior)
        self.asked = self.found = 1.0

    def learn(self, budget: int, offered: int, accepted: int) -> None:
        self.right = self.right * self._decay + accepted
        self.wrong = self.wrong * self._decay + (accepted < offered)
        self.asked = self.asked * self._decay + budget
        self.found = self.found * self._decay + offered

    def fade(self, prior: float) -> None:
        """Nothing was guessed: what was seen counts a little less."""
        self.right += FADING * (2 * prior - self.right)
        self.wrong += FADING * (2 * (1 - prior) - self.wrong)

    @property
    def rate(self) -> float:
        """Chance that a guess is right, given that those before it were."""
        return self.right / (self.right + self.wrong)


class _Costs:
    """Seconds of steps over about as many rows, without guesses and with them."""

    def __init__(self) -> None:
        self.plain: deque[float] = deque(maxlen=KEPT)
        self.guessing: deque[tuple[int, float]] = deque(maxlen=2 * KEPT)  # tokens guessed, seconds
        self._line = 0.0, 0.0  # through those: seconds at no tokens, and for each

    def guessed(self, tokens: int, seconds: float) -> None:
        self.guessing.append((tokens, seconds))
        pairs = [(one, two) for one, two in combinations(self.guessing, 2) if one[0] != two[0]]
        slope = max(0.0, median_low((two[1] - one[1]) / (two[0] - one[0]) for one, two in pairs)) if pairs else 0.0
        base = median_low(seconds - slope * tokens for tokens, seconds in self.guessing) if pairs else 0.0
        self._line = base, slope

    def price(self) -> tuple[float, float]:
        """What guessing costs, and what a guessed token does, in plain steps; nothing until it is known."""
        if not self.plain or not self.guessing:
            return 0.0, 0.0
        plain, (base, slope) = median_low(self.plain), self._line
        if base <= plain:  # all of it is the tokens'
            each = median_low((seconds - plain) / max(0.1, tokens) for tokens, seconds in self.guessing)
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
        self._overlapped = capacity.depth > 1
        self._costs: dict[int, _Costs] = {}
        self._general = AcceptanceRate(decay=SLOW_DECAY)  # over all sequences
        self._began: dict[int, tuple[float, int, bool]] = {}  # by step: planned at, rows, whether it guesses
        self._last = 0.0
        self._guessed = 0  # steps with guesses since one without was timed
        self._plain = 0  # steps without guesses, to time one
        self._waited = 0  # steps since guesses last paid, or were last tried
        self._wait = FIRST_WAIT
        self._tried = 0  # steps of the trial under way
        self._trying = False  # whether the latest budgets are a trial's
        self.rests = False  # nothing will be guessed for a while

    def budgets(self, running: list[Sequence]) -> dict[Sequence, int]:
        """How much to guess for which of the sequences that need one token only. Empty: a plain step is better."""
        ready = [s for s in running if s.known - s.computed == 1]
        room = min(self._most, (self._tokens - len(ready)) // max(1, len(ready)))
        able = [s for s in ready if s.outputs and not (s.request.beam or s.hook or s.request.pooling)]
        if room <= 0 or not able:
            return {}
        if not self._adapts:
            return self._capped(dict.fromkeys(able, room))
        costs = self._costs.setdefault(len(ready).bit_length(), _Costs())
        self.rests = False
        if not costs.plain or self._guessed >= PLAIN_EVERY:
            return {}
        fixed, slope = costs.price()
        price = slope * len(ready)  # of a guessed token, in drawn ones
        budgets, gain, tokens = {}, 0.0, 0.0
        for seq in able:
            acceptance = self._rates.get(seq)
            if acceptance is None:
                acceptance = self._rates[seq] = AcceptanceRate(self._general.rate)
            rate, share = acceptance.rate, acceptance.found / acceptance.asked
            count, right = 0, rate
            while count < room and right > price:
                count, gain, right = count + 1, gain + right * share, right * rate
            if count:
                budgets[seq] = count
                tokens += count * share
            else:
                acceptance.fade(self._general.rate)
        self._trying = gain <= (fixed + slope * tokens) * len(ready)
        if not self._trying:
            return self._capped(budgets)
        known = len(costs.guessing) > len(TRIAL)  # the first measurements are of things done for the first time
        cost = sum(fixed + slope * len(able) * min(count, room) for count in TRIAL) if known else 0.0
        left = 0 if self._tried else max(self._wait, cost / LOSS) - self._waited  # steps until guesses are tried again
        self.rests = left > WARM
        return self._capped(dict.fromkeys(able, min(TRIAL[self._tried], room))) if left <= 0 else {}

    def _capped(self, budgets: dict[Sequence, int]) -> dict[Sequence, int]:
        """No sequence draws more tokens than it may have."""
        capped = {seq: min(count, seq.limit - seq.known - 1) for seq, count in budgets.items()}
        return {seq: count for seq, count in capped.items() if count > 0}

    def planned(self, step: PlanBuilder) -> None:
        """A step is on its way, with the latest budgets or without any."""
        plan, now = step.plan, step.now
        if not plan.rows:
            return
        self.unverified.difference_update(seq for seq, _ in step.rows)
        self.unverified.update(seq for row, (seq, _) in zip(plan.rows, step.rows, strict=True) if row.drafts)
        guesses = any(row.drafts for row in plan.rows)
        if all(row.count == 1 for row in plan.rows) and not plan.admits:
            self._began[plan.step] = now, len(plan.rows), guesses
        if not guesses:
            self._waited += 1
            self._plain += 1
            if self._plain >= PLAIN_MOST:
                self._guessed = self._plain = 0
            return
        self._guessed += 1
        if self._trying:
            self._tried += 1
            if self._tried == len(TRIAL):
                self._waited = self._tried = 0
                self._wait = min(2 * self._wait, LONGEST_WAIT)
        else:
            self._waited = self._tried = 0
            self._wait = FIRST_WAIT

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
        planned, rows, guesses = self._began.pop(plan.step)
        seconds = now - max(planned, before)
        offered = sum(count for count, _ in result.drafts.values())
        for count, right in result.drafts.values():
            self._general.learn(count, count, right)
        if seconds <= 0 or (guesses and not offered and not self._overlapped):
            return  # no clock; or a step like any other, only that somebody was asked
        costs = self._costs.setdefault(rows.bit_length(), _Costs())
        if guesses:
            costs.guessed(offered, seconds)
        elif not costs.plain or not self._overlapped or planned < before:
            costs.plain.append(seconds)  # one that nothing ran beside is slower than they are when it counts
            self._guessed = self._plain = 0

    def preempted(self, seq: Sequence) -> None:
        self.unverified.discard(seq)

    def finished(self, seq: Sequence, reason: FinishReason | None) -> None:
        self.unverified.discard(seq)
        self._rates.pop(seq, None)
