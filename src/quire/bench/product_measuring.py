"""An engine that is given all the time it wants to be idle in."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from quire.engine.link import LocalLink, open_link
from quire.kernels.product_choices import choices
from quire.runtime.product_search import matrices
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError


class Measured(NamedTuple):
    choices: list[str]  # in words
    seconds: float
    longest: float  # seconds that a request would have waited for at most


def measure_products(options: EngineOptions) -> Measured:
    link = open_link(options, process=False, progress=True)
    assert isinstance(link, LocalLink)
    executor: Any = link.core.executor
    try:
        if not link.info.device.startswith("cuda") or not options.device.graphs or options.device.ranks > 1:
            raise ConfigError("products are measured by an engine of one GPU, with its captured steps (--graphs)")
        began, longest, more = time.perf_counter(), 0.0, True
        while more:
            piece = time.perf_counter()
            more = executor.idle(quiet=True)
            longest = max(longest, time.perf_counter() - piece)
        known = choices(executor.model.device)
        return Measured(known.describe(matrices(executor.model)), time.perf_counter() - began, longest)
    finally:
        link.close()
