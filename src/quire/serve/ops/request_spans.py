"""Spans for requests that ended: the ledger says when, the engine says what happened, the tracer writes it down.

Refuses to know: where spans go.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from quire.observe.ledger import Entry, Ledger
from quire.observe.spans import Tracer
from quire.types.errors import EngineDeadError
from quire.types.timeline import Timeline

if TYPE_CHECKING:
    from quire.engine.model_pool import ModelPool

logger = logging.getLogger("quire.serve")

ENGINE_TIMEOUT = 2.0  # seconds
MAX_PENDING = 256  # spans being made; beyond, requests go untraced


def traced(models: ModelPool, ledger: Ledger, endpoint: str | None) -> Ledger:
    """`ledger`, leaving spans at `endpoint` if there is one."""
    if endpoint is not None:
        tracer = Tracer.to(endpoint)
        atexit.register(tracer.close)
        follow(models, ledger, tracer)
    return ledger


def follow(models: ModelPool, ledger: Ledger, tracer: Tracer) -> None:
    """Have every entry that ends from now on leave a span."""
    tasks: set[asyncio.Task[None]] = set()

    async def write(entry: Entry) -> None:
        timelines: list[Timeline] = []
        if (frontend := models.loaded().get(entry.model)) is not None:
            with suppress(TimeoutError, EngineDeadError):
                timelines = await asyncio.wait_for(frontend.client.timelines(entry.request), ENGINE_TIMEOUT)
        try:
            tracer.record(entry, timelines)
        except Exception:
            logger.exception("a span could not be written")

    def ended(entry: Entry) -> None:
        if len(tasks) < MAX_PENDING:
            task = asyncio.get_running_loop().create_task(write(entry))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    ledger.on_end = ended
