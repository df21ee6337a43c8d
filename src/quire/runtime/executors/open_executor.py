"""Options → the executor that runs them."""

from __future__ import annotations

from collections.abc import Callable

from quire.runtime.executors.local_executor import LocalExecutor
from quire.runtime.executors.parallel_executor import ParallelExecutor
from quire.types.config import EngineOptions
from quire.types.grammar import Vocabulary
from quire.types.seams import WeightSource


def open_executor(
    options: EngineOptions,
    source: WeightSource,
    *,
    vocabulary: Callable[[int], Vocabulary],
    progress: bool = False,
) -> LocalExecutor:
    """`vocabulary`: given how many ids the model knows; called when a grammar needs it."""
    kind = ParallelExecutor if options.device.ranks > 1 else LocalExecutor
    return kind(options, source, vocabulary=vocabulary, progress=progress)
