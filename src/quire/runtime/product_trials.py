"""Whether whole steps are faster by another kernel of one product: alone it may be fast, and not go with those around
it, or cost the host more to launch than it saves.

Refuses to know: how a kernel came to be proposed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from statistics import median_low

from quire.kernels.product_choices import FIXED_ROWS, Choice, ProductChoices, Shape
from quire.runtime.worker import ForwardWorker

ROUNDS = 5  # of steps by either, in turn
MAX_STEP_RATIO = 0.99  # of the time by the usual kernel, in steps that are launched one by one


class ProductTrials:
    def __init__(self, worker: ForwardWorker, known: ProductChoices, clock: Callable[[], float] = time.perf_counter):
        self._worker, self._known, self._clock = worker, known, clock

    def faster(self, shape: Shape, usual: Choice, choice: Choice) -> Generator[bool, None, bool]:
        """Goes on in pieces. The faster of the two is chosen from then on."""
        self._known.put(shape, choice)
        if shape.rows > FIXED_ROWS:
            found = yield from self._launched(shape, usual, choice)
        else:
            found = self._worker.try_again(shape.rows)
        self._known.put(shape, choice if found else usual)
        return found

    def _launched(self, shape: Shape, usual: Choice, choice: Choice) -> Generator[bool, None, bool]:
        """In steps that are too large to be captured."""
        times: dict[Choice, list[float]] = {usual: [], choice: []}
        for turn in range(ROUNDS + 1):
            for each, found in times.items():
                self._known.put(shape, each)
                began = self._clock()
                self._worker.sketch_step(shape.rows)
                if turn:  # the first of each meets new lengths
                    found.append(self._clock() - began)
                yield True
        return median_low(times[choice]) < MAX_STEP_RATIO * median_low(times[usual])
