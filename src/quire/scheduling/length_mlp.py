"""A small network that learns, from answers that ended, how long the next will become: two quantiles of its logarithm.

    features of a request ──► 16 tanh units ──► the median, and how far above it nine of ten answers stay

Trained online by the pinball loss on the latest answers; a few kB, plain numpy. Refuses to know: sequences, policies.
"""

from __future__ import annotations

import math
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


class LengthMLP:
    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        self._rng = Random(seed)
        inputs = len(self._features_of(100, 100, grammar=False, habit=FIRST_GUESS, spread=1.0))
        self._w1 = (rng.standard_normal((inputs, HIDDEN)) / math.sqrt(inputs)).astype(np.float32)
        self._b1 = np.zeros(HIDDEN, np.float32)
        self._w2 = np.zeros((HIDDEN, 2), np.float32)
        self._b2 = np.array([0.0, 0.8], np.float32)  # over the tenant's habit; the second, over the first
        self._moments = [np.zeros_like(p) for p in self._parameters for _ in range(2)]
        self._steps = 0
        self._x = np.zeros((REMEMBERED, inputs), np.float32)
        self._y = np.zeros(REMEMBERED, np.float32)
        self._seen = 0
        self._untrained = 0  # answers since the last step of training
        self._habit = [FIRST_GUESS] * TENANTS  # mean logarithm of a tenant's answers
        self._spread = [1.0] * TENANTS

    @property
    def _parameters(self) -> list[Array]:
        return [self._w1, self._b1, self._w2, self._b2]

    def predict(self, request: Request, most: int) -> Expected:
        at = self._tenant(request)
        hidden = np.tanh(self._features(request, most, at) @ self._w1 + self._b1)
        over, more = hidden @ self._w2 + self._b2
        likely = self._habit[at] + float(over)
        high = likely + math.log1p(math.exp(min(float(more), 20.0)))
        top = math.log(max(most, 1))
        return Expected(math.exp(min(likely, top)), math.exp(min(high, top)))

    def learn(self, request: Request, most: int, outputs: int) -> None:
        at, value = self._tenant(request), math.log(max(outputs, 1))
        place = self._seen % REMEMBERED
        self._x[place] = self._features(request, most, at)
        self._y[place] = value - self._habit[at]
        self._seen += 1
        self._spread[at] += HABIT_WEIGHT * (abs(value - self._habit[at]) - self._spread[at])
        self._habit[at] += HABIT_WEIGHT * (value - self._habit[at])
        self._untrained += 1

    def train(self) -> None:
        """One step on some of the answers it remembers, the latest among them, if there are enough new ones."""
        if self._untrained >= (1 if self._seen <= EAGER else TRAIN_EVERY):
            self._untrained = 0
            held = min(self._seen, REMEMBERED)
            picked = [(self._seen - 1) % REMEMBERED, *(self._rng.randrange(held) for _ in range(BATCH - 1))]
            self._train(self._x[picked], self._y[picked])

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
        gradients = [x.T @ d_hidden, d_hidden.sum(0), hidden.T @ d_out, d_out.sum(0)]
        self._steps += 1
        rate = LEARNING_RATE * math.sqrt(1 - 0.999**self._steps) / (1 - 0.9**self._steps)
        for i, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            first, second = self._moments[2 * i], self._moments[2 * i + 1]
            first += 0.1 * (gradient - first)
            second += 0.001 * (gradient**2 - second)
            parameter -= rate * first / (np.sqrt(second) + 1e-8)

    @staticmethod
    def _tenant(request: Request) -> int:
        return sum(request.tenant.encode()) % TENANTS

    def _features(self, request: Request, most: int, at: int) -> Array:
        params = request.params
        return self._features_of(
            len(request.prompt),
            most,
            grammar=params.grammar is not None,
            habit=self._habit[at],
            spread=self._spread[at],
        )

    @staticmethod
    def _features_of(prompt: int, most: int, *, grammar: bool, habit: float, spread: float) -> Array:
        size, top = math.log1p(prompt) / 5 - 1, math.log1p(most) / 5 - 1
        short = prompt < 64, prompt < 256, prompt < 1024, prompt < 4096
        return np.array((size, size**2, top, grammar, habit / 5 - 1, spread, *short), np.float32)
