"""Options → the executor that runs them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from quire.runtime.executors.local_executor import LocalExecutor
from quire.runtime.executors.parallel_executor import ParallelExecutor
from quire.runtime.held_weights import HolderLink
from quire.types.config import EngineOptions
from quire.types.grammar import Vocabulary
from quire.types.seams import WeightSource

log = logging.getLogger(__name__)


def open_executor(
    options: EngineOptions,
    source: WeightSource,
    *,
    vocabulary: Callable[[int], Vocabulary],
    holder: HolderLink | None = None,
    progress: bool = False,
) -> LocalExecutor:
    """`vocabulary`: given how many ids the model knows; called when a grammar needs it. `holder`: of weights that
    outlast this process."""
    if holder is not None and (why_not := not_held(options)):
        log.warning("weights are not held: %s", why_not)
        holder = None
    if options.device.ranks > 1:
        return ParallelExecutor(options, source, vocabulary=vocabulary, progress=progress)
    return LocalExecutor(options, source, vocabulary=vocabulary, holder=holder, progress=progress)


def not_held(options: EngineOptions) -> str:
    """Why weights of an engine cannot be held; nothing where they can."""
    if options.device.context_parallel > 1:
        return "every rank has its own"
    if options.device.ranks > 1:
        return "they are divided between ranks"
    return "keys are scaled by channel once they are loaded" if options.cache.kv_dtype == "int8-kivi" else ""
