"""/v1/replicas: the engines behind this server, and what operators may do with each.

GET lists them. POST .../{id}/drain sends one nothing new and has the rest of its requests go on elsewhere, .../activate
takes that back, .../role gives it another role, .../restart replaces it; /v1/replicas/restart replaces all, one after
the other. No request is lost.
Refuses to know: how requests go on elsewhere, who starts replicas.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.generation import Serving
from quire.serve.http.http_io import decode, json, read_body
from quire.serve.http.openapi import answers
from quire.serve.ops.health import all_replicas
from quire.types.autoscaling import AutoscalingView
from quire.types.errors import InputError
from quire.types.membership import ReplicaView
from quire.types.seams import ReplicaOperator


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    """`timeout`: seconds that requests have to finish where they are (default: as long as at a server's end)."""

    timeout: Annotated[float, Meta(ge=0, le=24 * 3600)] | None = None


class RoleBody(msgspec.Struct, forbid_unknown_fields=True):
    """`role`: prefill (it computes prompts for others), decode or both."""

    role: Literal["prefill", "decode", "both"]


class ReplicaList(msgspec.Struct):
    """`pending`: requests that wait for a replica while there is none."""

    data: list[ReplicaView]
    object: str = "list"
    pending: int = 0
    autoscaling: AutoscalingView | None = None


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["replicas"])

    def operator() -> ReplicaOperator:
        client = serving.frontend.client
        if not isinstance(client, ReplicaOperator):
            raise InputError("this server has one engine of its own; start it with replicas to replace them one by one")
        return client

    async def timeout(request: Request) -> float:
        data = await read_body(request, serving.max_body)
        asked = decode(msgspec.json.Decoder(DrainBody), data).timeout if data else None
        return serving.options.grace if asked is None else asked

    def answer(found: msgspec.Struct) -> Response:
        return Response(json(found), media_type="application/json")

    def listed(found: list[ReplicaView]) -> Response:
        client = serving.frontend.client
        if not isinstance(client, ReplicaOperator):
            return answer(ReplicaList(found))
        return answer(ReplicaList(found, pending=client.pending, autoscaling=client.autoscaling()))

    shown = answers(ReplicaView, takes=DrainBody)

    @routes.get("/v1/replicas", summary="The replicas and what each does", openapi_extra=answers(ReplicaList))
    async def replicas() -> Response:
        return listed(await all_replicas(serving))

    @routes.post("/v1/replicas/restart", summary="Rolling restart", openapi_extra=answers(ReplicaList, takes=DrainBody))
    async def restart_all(request: Request) -> Response:
        return listed(await operator().rolling_restart(await timeout(request)))

    @routes.post("/v1/replicas/{id}/drain", summary="Send a replica nothing new", openapi_extra=shown)
    async def drain(id: str, request: Request) -> Response:
        return answer(await operator().drain(id, await timeout(request)))

    @routes.post("/v1/replicas/{id}/activate", summary="Route to a drained replica", openapi_extra=answers(ReplicaView))
    async def activate(id: str) -> Response:
        return answer(operator().activate(id))

    @routes.post(
        "/v1/replicas/{id}/role", summary="Prefill, decode or both", openapi_extra=answers(ReplicaView, takes=RoleBody)
    )
    async def role(id: str, request: Request) -> Response:
        asked = decode(msgspec.json.Decoder(RoleBody), await read_body(request, serving.max_body))
        return answer(await operator().set_role(id, asked.role))

    @routes.post("/v1/replicas/{id}/restart", summary="Drain a replica and start it anew", openapi_extra=shown)
    async def restart(id: str, request: Request) -> Response:
        return answer(await operator().restart(id, await timeout(request)))

    return routes
