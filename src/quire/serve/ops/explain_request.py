"""GET /v1/requests, DELETE /v1/requests/{id}, GET /v1/requests/{id}/explain: which requests there are and were, an end
to one, where its time went and why its prefix hit or missed.

A key sees its own requests; one with the admin scope sees all. Refuses to know: how times are measured.
"""

from __future__ import annotations

import asyncio
import time
from itertools import islice

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from quire.observe.explanations import Explanation, explain
from quire.observe.ledger import Entry
from quire.serve.core.api_keys import ADMIN
from quire.serve.core.context import current
from quire.serve.core.generation import Serving
from quire.serve.http.http_io import json
from quire.serve.http.openapi import answers
from quire.types.errors import EngineDeadError, RequestNotFoundError
from quire.types.timeline import Timeline

ENGINE_TIMEOUT = 2.0  # seconds
MAX_LISTED = 2048


class Explanations(msgspec.Struct):
    """One entry per prompt of the request."""

    data: list[Explanation]
    object: str = "list"


class RequestSummary(msgspec.Struct, kw_only=True):
    """One engine request; times in seconds, those of day since the epoch. `ended` is null while it runs, `ttft_s` until
    its first token, `tpot_s` (time per output token) until its second."""

    id: str
    key: str
    model: str
    arrived: float
    ended: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    finish: str
    error: str


class RequestList(msgspec.Struct):
    """The latest first."""

    data: list[RequestSummary]
    object: str = "list"


class Cancelled(msgspec.Struct):
    id: str
    cancelled: bool  # false: it had ended already


def summary(entry: Entry) -> RequestSummary:
    meter, first = entry.meter, entry.meter.first
    spread = meter.tokens - entry.branches
    after = (entry.ended or time.time()) - entry.arrived - (first - meter.started)
    return RequestSummary(
        id=entry.request,
        key=entry.owner,
        model=entry.model,
        arrived=entry.arrived,
        ended=entry.ended or None,
        prompt_tokens=entry.prompt,
        cached_tokens=meter.cached,
        output_tokens=meter.tokens,
        ttft_s=first - meter.started if first else None,
        tpot_s=after * entry.branches / spread if first and spread > 0 else None,
        finish=",".join(meter.reasons),
        error="cancelled" if entry.error in ("GeneratorExit", "CancelledError") else entry.error,
    )


async def timelines(serving: Serving, entry: Entry) -> list[Timeline]:
    """The engine's account of a request; empty if it no longer has one, or is gone itself."""
    frontend = serving.models.loaded().get(entry.model)
    if frontend is None:
        return []
    try:
        return await asyncio.wait_for(frontend.client.timelines(entry.request), ENGINE_TIMEOUT)
    except (TimeoutError, EngineDeadError):
        return []


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["operations"])

    def own(id: str) -> list[Entry]:
        key = current().key
        entries = [e for e in serving.ledger.find(id) if ADMIN in key.scopes or e.owner == key.name]
        if not entries:
            raise RequestNotFoundError(f"no request {id[:128]!r} of yours is remembered; the latest few thousand are")
        return entries

    @routes.get("/v1/requests", summary="Requests, running and ended", openapi_extra=answers(RequestList))
    async def list_requests(limit: int = 100) -> Response:
        await serving.refresh()
        key = current().key
        mine = (e for e in serving.ledger.latest() if ADMIN in key.scopes or e.owner == key.name)
        found = [summary(entry) for entry in islice(mine, max(0, min(limit, MAX_LISTED)))]
        return Response(json(RequestList(found)), media_type="application/json")

    @routes.delete("/v1/requests/{id}", summary="Cancel a request", openapi_extra=answers(Cancelled))
    async def cancel_request(id: str) -> Response:
        await serving.refresh()
        running = [entry for entry in own(id) if not entry.ended]
        for entry in running:
            if (frontend := serving.models.loaded().get(entry.model)) is not None:
                frontend.client.abort(entry.request)
        return Response(json(Cancelled(id, bool(running))), media_type="application/json")

    @routes.get(
        "/v1/requests/{id}/explain", summary="Where did a request's time go?", openapi_extra=answers(Explanations)
    )
    async def explain_request(id: str) -> Response:
        await serving.refresh()
        everything, now = ADMIN in current().key.scopes, time.time()
        found = [explain(e, await timelines(serving, e), now, others=everything) for e in own(id)]
        return Response(json(Explanations(found)), media_type="application/json")

    return routes
