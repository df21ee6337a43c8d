"""GET /v1/requests/{id}/explain: where a request's time went and why its prefix hit or missed.

A key sees its own requests; one with the admin scope sees all. Refuses to know: how times are measured.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from quire.observe.explanations import Explanation, explain
from quire.serve.core.api_keys import ADMIN
from quire.serve.core.context import current
from quire.serve.core.generation import Serving
from quire.serve.http.http_io import json
from quire.serve.http.openapi import answers
from quire.types.errors import EngineDeadError, RequestNotFoundError
from quire.types.timeline import Timeline

ENGINE_TIMEOUT = 2.0  # seconds


class Explanations(msgspec.Struct):
    """One entry per prompt of the request."""

    data: list[Explanation]
    object: str = "list"


async def timelines(serving: Serving, request: str) -> list[Timeline]:
    """The engine's account of a request; empty if it no longer has one, or is gone itself."""
    try:
        return await asyncio.wait_for(serving.frontend.client.timelines(request), ENGINE_TIMEOUT)
    except (TimeoutError, EngineDeadError):
        return []


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["operations"])

    @routes.get(
        "/v1/requests/{id}/explain", summary="Where did a request's time go?", openapi_extra=answers(Explanations)
    )
    async def explain_request(id: str) -> Response:
        key = current().key
        everything = ADMIN in key.scopes
        entries = [entry for entry in serving.ledger.find(id) if everything or entry.owner == key.name]
        if not entries:
            raise RequestNotFoundError(f"no request {id[:128]!r} of yours is remembered; the latest few thousand are")
        now = time.time()
        found = [explain(e, await timelines(serving, e.request), now, others=everything) for e in entries]
        return Response(json(Explanations(found)), media_type="application/json")

    return routes
