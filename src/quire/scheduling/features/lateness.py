"""Whether a request will have its first token later than its target: logistic regression, trained online.

Under overload that decides about a wait: who is in time waits for less than the target, and who is too late goes behind
all others, those who come later included. What list scheduling says is where it begins: late if that is beyond the
target. How much worse it gets for those who come later and go first is learned, from what came of each prediction; that
is known once the target has passed. Refuses to know: waits in seconds.
"""

from __future__ import annotations

import heapq
from math import exp, log, log1p

LEARNING_RATE = 0.3
STEEPNESS = 4.0  # at first, of the odds in the logarithm of the wait over the target
SCALE = 3.0  # of the logarithms of the others
LIMIT = 30.0  # of the logarithm of the odds
LEAST_TARGET = 1e-3  # seconds: shorter ones are as good as missed
MOST_SERVED = 64  # deadlines kept of those that are served, beside as many as of those that are not

Features = tuple[float, float, float, float]


class LatenessModel:
    def __init__(self) -> None:
        self._weights: Features = (0.0, STEEPNESS, 0.0, 0.0)
        self._open: dict[int, tuple[float, Features]] = {}  # by when each must be served
        self._deadlines: list[tuple[float, int]] = []

    def expects(self, sequence: int, now: float, target: float, *, seconds: float, prefill: float, ahead: int) -> bool:
        """Whether one that would wait so long, if nobody came, will be too late; what comes of it is learned.
        `prefill`: what of it is its own prompt; `ahead`: how many go before it."""
        for late in self._passed(now):
            self._learn(late, True)
        target = max(target, LEAST_TARGET)
        own = log(max(prefill, 1e-6) / target) / SCALE
        features = (1.0, log(max(seconds, 1e-6) / target), log1p(ahead) / SCALE, own)
        self._open[sequence] = now + target, features
        heapq.heappush(self._deadlines, (now + target, sequence))
        if len(self._deadlines) > 2 * len(self._open) + MOST_SERVED:
            self._deadlines = sorted((deadline, id) for id, (deadline, _) in self._open.items())
        return self._odds(features) > 0

    def served(self, sequence: int, now: float) -> None:
        """It has its first token."""
        if (found := self._open.pop(sequence, None)) is not None:
            self._learn(found[1], now > found[0])

    def dropped(self, sequence: int) -> None:
        """It ended without one."""
        self._open.pop(sequence, None)

    def _passed(self, now: float) -> list[Features]:
        """Of those whose deadline has passed unserved."""
        found = []
        while self._deadlines and self._deadlines[0][0] < now:
            _, sequence = heapq.heappop(self._deadlines)
            if sequence in self._open:
                found.append(self._open.pop(sequence)[1])
        return found

    def _odds(self, features: Features) -> float:
        """The logarithm of them."""
        return sum(weight * value for weight, value in zip(self._weights, features, strict=True))

    def _learn(self, features: Features, late: bool) -> None:
        error = 1 / (1 + exp(-max(-LIMIT, min(LIMIT, self._odds(features))))) - late
        bias, wait, ahead, own = (w - LEARNING_RATE * error * x for w, x in zip(self._weights, features, strict=True))
        self._weights = bias, wait, ahead, own
