"""How long answers become: one interface, the plainest predictor behind it, and how far predictions can be trusted.

Refuses to know: sequences, policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from quire.types.policy import Expected
from quire.types.request import Request

EMA_WEIGHT = 0.02  # of the latest answer, in what a constant predictor knows


class LengthPredictor(Protocol):
    def predict(self, request: Request, most: int) -> Expected:
        """Of an answer of at most so many tokens."""
        ...

    def learn(self, request: Request, most: int, outputs: int) -> None:
        """An answer ended by itself after so many."""
        ...

    def train(self) -> None:
        """A step in which answers ended is over: once, however many there were."""
        ...


class ConstantPredictor:
    """The mean of all answers so far, whoever asks."""

    def __init__(self, start: float = 256.0):
        self._mean = start
        self._square = start * start * 2

    def predict(self, request: Request, most: int) -> Expected:
        spread = max(0.0, self._square - self._mean**2) ** 0.5
        return Expected(min(most, self._mean), min(most, self._mean + 1.3 * spread))

    def learn(self, request: Request, most: int, outputs: int) -> None:
        self._mean += EMA_WEIGHT * (outputs - self._mean)
        self._square += EMA_WEIGHT * (outputs**2 - self._square)

    def train(self) -> None:
        pass


class OraclePredictor:
    """What will be, where that is known: in a simulation."""

    def __init__(self, lengths: Mapping[str, int]):
        self._lengths = lengths

    def predict(self, request: Request, most: int) -> Expected:
        length = float(min(most, self._lengths[request.id]))
        return Expected(length, length)

    def learn(self, request: Request, most: int, outputs: int) -> None:
        pass

    def train(self) -> None:
        pass
