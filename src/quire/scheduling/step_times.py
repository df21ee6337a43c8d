"""How long steps take, learned from the latest of them: `decode_seconds(rows) + rate * work`.

What a step takes by itself depends on how many sequences draw a token in it, and is kept for each power of two of them:
what is known of one stays known while there are many. A prompt token is one unit of work and more the further back it
attends. Refuses to know: targets, sequences.
"""

from __future__ import annotations

from quire.types.plan import StepPlan

WORK_DOUBLING_CONTEXT = 16384  # tokens of context that double a token's work
SMALL_WORK = 64  # of prompts, up to which a step that was short says that steps without any are
EMA_WEIGHT = 0.2  # weight of the latest step
LEAST_SHARE = 0.1  # of a step with prompts, that is theirs


def work_of(start: int, count: int) -> float:
    """Of so many tokens from position `start` on."""
    return count * (1 + start / WORK_DOUBLING_CONTEXT)


def plan_work(plan: StepPlan) -> float:
    return sum([work_of(row.start - row.shift, row.count) for row in plan.rows if row.count > 1])


class StepTimes:
    def __init__(self) -> None:
        self._decode: dict[int, tuple[float, float]] = {}  # rows and seconds, by the logarithm of rows
        self._points: list[tuple[float, float]] = []  # the same, sorted
        self._seconds = 0.0  # beyond that, of the latest steps with prompts, and their work
        self._work = 0.0

    @property
    def rate(self) -> float:
        """Seconds of a unit of work; 0: nothing is known."""
        return self._seconds / self._work if self._work else 0.0

    def decode_seconds(self, rows: float) -> float:
        """Of a step in which so many sequences draw a token and no prompt is computed; 0: nothing is known."""
        points = self._points
        if not points:
            return 0.0
        low = points[0]
        if rows <= low[0]:
            return low[1]
        for high in points:
            if rows <= high[0]:
                return low[1] + (high[1] - low[1]) * (rows - low[0]) / (high[0] - low[0])
            before, low = low, high
        if len(points) == 1:
            return low[1]
        slope = max(0.0, (low[1] - before[1]) / (low[0] - before[0]))
        return low[1] + slope * (rows - low[0])

    def learn(self, took: float, rows: int, work: float) -> None:
        """A step took so long, in which so many sequences drew a token and so much of prompts was computed."""
        base = self.decode_seconds(rows)
        if not work or (work <= SMALL_WORK and base > took):  # as little as there may be: the base is what keeps it so
            self._learn_decode(rows, took)
        else:
            self._learn_work(max(took - base, LEAST_SHARE * took), work)

    def _learn_decode(self, rows: int, seconds: float) -> None:
        if rows:
            place = rows.bit_length()
            mean, known = self._decode.get(place, (float(rows), seconds))
            now = known + EMA_WEIGHT * (seconds - known)
            for fewer in range(1, place):  # take no longer: one that took long once, and is not seen again, is got over
                if fewer in self._decode:
                    self._decode[fewer] = self._decode[fewer][0], min(self._decode[fewer][1], now)
            self._decode[place] = mean + EMA_WEIGHT * (rows - mean), now
            self._points = sorted(self._decode.values())

    def _learn_work(self, seconds: float, work: float) -> None:
        """Those with much work tell more. Few tokens take longer than they would among many, so that they tell at most
        what those told; and let less be forgotten."""
        typical = EMA_WEIGHT * self._work
        if work <= SMALL_WORK < typical:
            seconds = min(seconds, self.rate * work)
        decay = EMA_WEIGHT * min(1.0, work / typical) if typical else 0.0
        self._seconds += seconds - decay * self._seconds
        self._work += work - decay * self._work
