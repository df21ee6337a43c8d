"""GET /view: the engine as it is now, once or as a stream of two pictures a second, for operators.

However many look, the engine is asked twice a second, and not at all while nobody does.

Refuses to know: how it is drawn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from quire.engine.model_pool import ModelState
from quire.observe.window import Glance, Window
from quire.serve.core.generation import Serving
from quire.serve.http.http_io import EventStream, json
from quire.serve.http.openapi import answers
from quire.types.errors import EngineDeadError, OverloadedError
from quire.types.membership import ReplicaView
from quire.types.view import EngineView

logger = logging.getLogger("quire.serve")

INTERVAL = 0.5  # seconds between pictures
MAX_VIEWERS = 16
ENGINE_TIMEOUT = 2.0


class Picture(msgspec.Struct, kw_only=True):
    """`engine` is null while the engine does not answer."""

    model: str
    ready: bool
    engine: EngineView | None
    since_last: Glance
    refused: int  # requests turned away since the server started
    replicas: list[ReplicaView]
    models: list[ModelState]  # all of the server's


class Feed:
    """One reader of a model's engine for all viewers."""

    def __init__(self, serving: Serving, model: str):
        self._serving = serving
        self._model = model
        self._viewers: set[asyncio.Queue[bytes]] = set()
        self._task: asyncio.Task[None] | None = None

    async def picture(self) -> bytes:
        serving = self._serving
        view: EngineView | None = None
        replicas: list[ReplicaView] = []
        frontend = serving.models.loaded().get(self._model)
        if frontend is not None:
            with suppress(TimeoutError, EngineDeadError):
                view = await asyncio.wait_for(frontend.client.view(), ENGINE_TIMEOUT)
                replicas = await asyncio.wait_for(frontend.client.replicas(), ENGINE_TIMEOUT)
        return json(
            Picture(
                model=self._model,
                ready=view is not None and frontend is not None and frontend.client.trouble() is None,
                engine=view,
                since_last=self._window.take(),
                refused=sum(serving.admission.refused.values()),
                replicas=replicas,
                models=serving.models.states(),
            )
        )

    @property
    def _window(self) -> Window:
        return self._serving.metrics_by_model[self._model].window

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Events until the server drains; a viewer that lags skips pictures."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise OverloadedError(f"{MAX_VIEWERS} viewers are looking already", retry_after=10)
        queue: asyncio.Queue[bytes] = asyncio.Queue(1)
        self._viewers.add(queue)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            while not self._serving.admission.draining:
                yield b"data: " + await queue.get() + b"\n\n"
        finally:
            self._viewers.discard(queue)

    async def _run(self) -> None:
        self._window.take()  # what piled up while nobody looked
        while self._viewers:
            try:
                picture = await self.picture()
                for queue in self._viewers:
                    if not queue.full():
                        queue.put_nowait(picture)
            except Exception:
                logger.exception("no picture of the engine could be made")  # the viewers wait for the next
            await asyncio.sleep(INTERVAL)
        self._task = None


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["operations"])
    feeds = {name: Feed(serving, name) for name in serving.models.names}

    @routes.get("/view", summary="The engine now: requests, batch, pages, prefixes", openapi_extra=answers(Picture))
    async def view(stream: bool = False, model: str | None = None) -> Response:
        feed = feeds[serving.find_model(model)[0]]
        if stream:
            return EventStream(feed.watch())
        return Response(await feed.picture(), media_type="application/json")

    return routes
