"""A small network that learns, from answers that ended, how long the next will become: two quantiles of its logarithm.

    features of a request ──► 16 tanh units ──► the median, and how far above it nine of ten answers stay

Trained online by the pinball loss on the latest answers; a few kB, plain numpy. Refuses to know: sequences, policies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import numpy as np
import numpy.typing as npt

from quire.types.policy import Expected
from quire.types.request import Request

HIDDEN = 16
TENANTS = 64  # hashed: whose habits are kept apart
QUANTILES = (0.5, 0.9)
LEARNING_RATE = 0.02
BATCH = 32  # of the latest answers, at each step of training
REMEMBERED = 512  # answers
EAGER = 64  # answers after each of which it is trained; later, after so many
TRAIN_EVERY = 8
HABIT_WEIGHT = 0.05  # of a tenant's latest answer
FIRST_GUESS = math.log(200.0)
Array = npt.NDArray[np.float32]
Features = tuple[float, ...]


def _flat(shapes: Sequence[tuple[int, ...]]) -> tuple[Array, list[Array]]:
    """One array, and parts of it of these shapes."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    whole = np.zeros(ends[-1], np.float32)
    return whole, [part.reshape(shape) for part, shape in zip(np.split(whole, ends[:-1]), shapes, strict=True)]


class LengthMLP:
    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        self._rng = Random(seed)
        inputs = len(self._features_of(100, 100, grammar=False, habit=FIRST_GUESS, spread=1.0))
        shapes = [(inputs, HIDDEN), (HIDDEN,), (HIDDEN, 2), (2,)]
        self._parameters, (self._w1, self._b1, self._w2, self._b2) = _flat(shapes)
        self._gradient, self._gradients = _flat(shapes)
        self._w1[:] = rng.standard_normal((inputs, HIDDEN)) / math.sqrt(inputs)
        self._b2[:] = [0.0, 0.8]  # over the tenant's habit; the second, over the first
        self._moments = np.zeros((2, len(self._parameters)), np.float32)
        self._steps = 0
        self._answers: list[tuple[Features, float]] = []  # the latest, with what became of each; the oldest replaced
        self._seen = 0
        self._untrained = 0  # answers since the last step of training
        self._habit = [FIRST_GUESS] * TENANTS  # mean logarithm of a tenant's answers
        self._spread = [1.0] * TENANTS

    def predict(self, request: Request, most: int) -> Expected:
        at = self._tenant(request)
        x = np.array(self._features(request, most, at), np.float32)
        hidden = np.tanh(x.dot(self._w1) + self._b1)
        over, more = (hidden.dot(self._w2) + self._b2).tolist()
        likely = self._habit[at] + over
        high = likely + math.log1p(math.exp(min(more, 20.0)))
        top = math.log(max(most, 1))
        return Expected(math.exp(min(likely, top)), math.exp(min(high, top)))

    def learn(self, request: Request, most: int, outputs: int) -> None:
        at, value = self._tenant(request), math.log(max(outputs, 1))
        place = self._seen % REMEMBERED
        self._answers[place : place + 1] = [(self._features(request, most, at), value - self._habit[at])]
        self._seen += 1
        self._spread[at] += HABIT_WEIGHT * (abs(value - self._habit[at]) - self._spread[at])
        self._habit[at] += HABIT_WEIGHT * (value - self._habit[at])
        self._untrained += 1

    def train(self) -> None:
        """One step on some of the answers it remembers, the latest among them, if there are enough new ones."""
        if self._untrained >= (1 if self._seen <= EAGER else TRAIN_EVERY):
            self._untrained = 0
            held = len(self._answers)
            picked = [(self._seen - 1) % REMEMBERED, *(self._rng.randrange(held) for _ in range(BATCH - 1))]
            x, y = zip(*(self._answers[place] for place in picked), strict=True)
            self._train(np.array(x, np.float32), np.array(y, np.float32))

    def _train(self, x: Array, y: Array) -> None:
        """One step of Adam on the pinball loss of both quantiles."""
        hidden = np.tanh(x @ self._w1 + self._b1)
        out = hidden @ self._w2 + self._b2
        more = np.log1p(np.exp(np.minimum(out[:, 1], 20.0)))
        low, high = QUANTILES
        d_likely = np.where(y > out[:, 0], -low, 1 - low)
        d_high = np.where(y > out[:, 0] + more, -high, 1 - high)
        slope = 1 / (1 + np.exp(-out[:, 1]))
        d_out = np.stack([d_likely + d_high, d_high * slope], axis=1).astype(np.float32) / len(y)
        d_hidden = (d_out @ self._w2.T) * (1 - hidden**2)
        found = (x.T @ d_hidden, d_hidden.sum(0), hidden.T @ d_out, d_out.sum(0))
        for gradient, value in zip(self._gradients, found, strict=True):
            gradient[:] = value
        self._steps += 1
        rate = LEARNING_RATE * math.sqrt(1 - 0.999**self._steps) / (1 - 0.9**self._steps)
        first, second = self._moments
        first += 0.1 * (self._gradient - first)
        second += 0.001 * (self._gradient**2 - second)
        self._parameters -= rate * first / (np.sqrt(second) + 1e-8)

    @staticmethod
    def _tenant(request: Request) -> int:
        return sum(request.tenant.encode()) % TENANTS

    def _features(self, request: Request, most: int, at: int) -> Features:
        params = request.params
        return self._features_of(
            len(request.prompt),
            most,
            grammar=params.grammar is not None,
            habit=self._habit[at],
            spread=self._spread[at],
        )

    @staticmethod
    def _features_of(prompt: int, most: int, *, grammar: bool, habit: float, spread: float) -> Features:
        size, top = math.log1p(prompt) / 5 - 1, math.log1p(most) / 5 - 1
        short = prompt < 64, prompt < 256, prompt < 1024, prompt < 4096
        return (size, size**2, top, grammar, habit / 5 - 1, spread, *short)
