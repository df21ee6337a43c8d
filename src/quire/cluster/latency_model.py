"""How long replicas take, learned from what became of requests: a line through the latest measurements.

    time to first token  =  base + slope * prompt work ahead and its own
    time per token       =  base + slope * requests under way

Refuses to know: clocks, replicas, who asks.
"""

from __future__ import annotations

MEMORY = 0.98  # of what was known, after one more measurement
WORK_DOUBLING_CONTEXT = 16384  # tokens of context that double the work of a prompt token


def prefill_work(tokens: int, cached: int) -> float:
    """Of a prompt, in tokens without context: each costs more the more it attends to."""
    return (tokens - cached) * (1 + (tokens + cached) / 2 / WORK_DOUBLING_CONTEXT)


class LatencyLine:
    """Least squares with forgetting; neither base nor slope is ever below 0."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.base = 0.0
        self.slope = 0.0

    @property
    def known(self) -> bool:
        return self._weight > 0

    def record(self, x: float, seconds: float) -> None:
        self._weight = MEMORY * self._weight + 1
        self._x = MEMORY * self._x + x
        self._y = MEMORY * self._y + seconds
        self._xx = MEMORY * self._xx + x * x
        self._xy = MEMORY * self._xy + x * seconds
        spread = self._weight * self._xx - self._x * self._x
        slope = (self._weight * self._xy - self._x * self._y) / spread if spread > 1e-9 * self._xx else -1.0
        base = (self._y - slope * self._x) / self._weight
        if slope < 0:
            slope, base = 0.0, self._y / self._weight
        elif base < 0:
            slope, base = self._xy / self._xx, 0.0
        self.slope, self.base = slope, base

    def seconds(self, x: float) -> float:
        return self.base + self.slope * x
