"""Rates of a cost model by least squares over measured steps: relative errors count, no rate is negative.

Where steps overlap, one that the host notices late seems long and the next one short; of several in a row together that
cannot be seen.

Refuses to know: how steps were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from quire.types.cost_model import Rates, StepWork
from quire.types.errors import ConfigError

KNEES = (0, 16, 32, 64, 96, 128, 160, 192, 256, 384, 512)
WEIGHTINGS = 4
OUTLIER = 10.0  # times the prediction at most, in the weights
MAX_ROUNDS = 1000


class Measured(NamedTuple):
    """Steps in a row, and how long they took together."""

    works: Sequence[StepWork]
    seconds: float

    def predicted(self, knee: int, rates: Rates) -> float:
        return sum(rates.seconds(work, knee) for work in self.works)


def fit(measured: Sequence[Measured], knees: Sequence[int] = KNEES) -> tuple[int, Rates]:
    """The knee and the rates that miss the least."""
    if len(measured) < len(Rates.__struct_fields__):
        raise ConfigError(f"{len(measured)} measured steps are too few to fit {len(Rates.__struct_fields__)} rates")
    seconds = np.array([one.seconds for one in measured])
    found = []
    for knee in knees:
        matrix = np.array([_features(one, knee) for one in measured])
        predicted = seconds
        for _ in range(WEIGHTINGS):  # by what is predicted: noise in what is measured would pull rates down
            rates = nonnegative_least_squares(matrix / predicted[:, None], seconds / predicted)
            predicted = np.maximum(matrix @ rates, seconds / OUTLIER)
        found.append((float(np.sum((seconds / predicted - 1) ** 2)), knee, rates))
    _, knee, rates = min(found, key=lambda one: one[0])
    fitted = Rates(*map(float, rates))
    attends_context = any(work.context_pairs for one in measured for work in one.works)
    return knee, fitted if attends_context else replace(fitted, context_pairs=None)


def errors(measured: Sequence[Measured], knee: int, rates: Rates) -> dict[str, float]:
    """How far predictions are from what was measured: of all steps together, and of each of `measured`."""
    predicted = np.array([one.predicted(knee, rates) for one in measured])
    seconds = np.array([one.seconds for one in measured])
    off = np.abs(predicted / seconds - 1)
    return {
        "total": float(predicted.sum() / seconds.sum() - 1),
        "median": float(np.median(off)),
        "p90": float(np.percentile(off, 90)),
    }


def _features(one: Measured, knee: int) -> list[float]:
    each = [
        (1, w.tokens, max(0, w.tokens - knee), w.rows, w.context, w.pairs, w.context_pairs) for w in one.works
    ]  # in the order of `Rates`
    return [float(sum(column)) for column in zip(*each, strict=True)]


def nonnegative_least_squares(
    matrix: npt.NDArray[np.float64], target: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Lawson and Hanson's active sets, columns scaled to unit length."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    columns = matrix / scale
    x = np.zeros(columns.shape[1])
    free = np.zeros(columns.shape[1], dtype=bool)
    for _ in range(MAX_ROUNDS):
        gradient = columns.T @ (target - columns @ x)
        if free.all() or gradient[~free].max() <= 1e-10:
            break
        free[np.argmax(np.where(free, -np.inf, gradient))] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
            if trial[free].min() > 0:
                x = trial
                break
            below = free & (trial <= 0)
            step = np.min(x[below] / (x[below] - trial[below]))
            x = x + step * (trial - x)
            free &= x > 1e-12
            x[~free] = 0.0
            if not free.any():
                break
    return x / scale
