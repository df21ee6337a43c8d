"""What computing and moving cost, measured while running: seconds a token, bytes a second.

Every answer may be None: nothing was measured yet, and then the caller tries. Refuses to know: what is decided.
"""

from __future__ import annotations

import math

MIN_STEP_TOKENS = 16  # tokens a step must compute to say something about prompts
EMA_WEIGHT = 0.2  # of the latest measurement


class Costs:
    def __init__(self, page_bytes: int):
        self._page_bytes = page_bytes
        self._token: float | None = None  # seconds a token of prompt takes
        self._page: dict[tuple[str, str], float] = {}  # seconds a page takes, by (from, to)

    def step(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens."""
        if tokens >= MIN_STEP_TOKENS and seconds > 0:
            self._token = _mean(self._token, seconds / tokens)

    def moved(self, source: str, target: str, pages: int, seconds: float) -> None:
        if pages and seconds > 0:
            way = source, target
            self._page[way] = _mean(self._page.get(way), seconds / pages)

    def compute(self, tokens: int) -> float | None:
        """Seconds to compute the KV of `tokens` tokens."""
        return None if self._token is None else self._token * tokens

    def move(self, source: str, target: str, pages: int) -> float | None:
        """Seconds to move pages."""
        page = self._page.get((source, target))
        return None if page is None else page * pages

    def decay(self, source: str, target: str) -> None:
        """A way that is not taken is not measured: let it look better by and by, until it is tried again."""
        if (source, target) in self._page:
            self._page[source, target] *= 0.9

    def rates(self) -> dict[str, float]:
        """Bytes a second by way, and tokens a second, for people."""
        found = {f"{a} → {b}": self._page_bytes / s for (a, b), s in self._page.items()}
        if self._token:
            found["tokens"] = 1 / self._token
        return found


def _mean(before: float | None, latest: float) -> float:
    """A moving mean of the logarithm: one slow step in a hundred does not decide."""
    return latest if before is None else math.exp((1 - EMA_WEIGHT) * math.log(before) + EMA_WEIGHT * math.log(latest))
