"""/v1/replicas: the engines behind this server, and what operators may do with each.

GET lists them. POST .../{id}/drain sends one nothing new and has the rest of its requests go on elsewhere, .../activate
takes that back, .../role gives it another role, .../restart replaces it; /v1/replicas/restart replaces all, one after
the other. No request is lost.
Refuses to know: how requests go on elsewhere, who starts replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter
from msgspec import Meta
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.generation import Serving
from quire.serve.http.http_io import decode, json, read_body
from quire.serve.http.openapi import answers
from quire.serve.ops.health import all_replicas
from quire.types.autoscaling import AutoscalingView
from quire.types.errors import InputError, ReplicaNotFoundError
from quire.types.membership import ReplicaView
from quire.types.seams import ReplicaOperator

ONE_ENGINE = "this model has one engine of its own; start it with replicas to replace them one by one"


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    """`timeout`: seconds that requests have to finish where they are (default: as long as at a server's end)."""

    timeout: Annotated[float, Meta(ge=0, le=24 * 3600)] | None = None


class RoleBody(msgspec.Struct, forbid_unknown_fields=True):
    """`role`: prefill (it computes prompts for others), decode or both."""

    role: Literal["prefill", "decode", "both"]


class ReplicaList(msgspec.Struct):
    """`pending`: requests that wait for a replica while there is none; of several models, those of all. Autoscaling is
    told by model where there are several."""

    data: list[ReplicaView]
    object: str = "list"
    pending: int = 0
    autoscaling: AutoscalingView | None = None
    autoscaling_by_model: dict[str, AutoscalingView] = {}


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["replicas"])

    def answer(shown: msgspec.Struct) -> Response:
        return Response(json(shown), media_type="application/json")

    @contextmanager
    def operated(model: str) -> Iterator[ReplicaOperator]:
        """The replicas of a model, which stays loaded meanwhile."""
        lease = serving.models.acquire_loaded(model)
        if lease is None:
            raise ReplicaNotFoundError(f"model {model!r} is not loaded")
        try:
            if not isinstance(lease.frontend.client, ReplicaOperator):
                raise InputError(ONE_ENGINE)
            yield lease.frontend.client
        finally:
            lease.release()

    @contextmanager
    def found(id: str) -> Iterator[tuple[ReplicaOperator, str, Callable[[ReplicaView], Response]]]:
        """A replica by the name that it is listed by: whose it is, what it is called there, how it is shown."""
        model, own, single = serving.models.names[0], id, serving.models.single_model
        if not single:
            model, _, own = id.rpartition(":") if id not in serving.models.names else (id, "", "")
            if model not in serving.models.names:
                raise ReplicaNotFoundError(f"there is no replica {id!r}")

        def shown(view: ReplicaView) -> Response:
            return answer(view if single else replace(view, id=id, model=model))

        with operated(model) as operator:
            yield operator, own, shown

    async def timeout(request: Request) -> float:
        data = await read_body(request, serving.max_body)
        asked = decode(msgspec.json.Decoder(DrainBody), data).timeout if data else None
        return serving.options.grace if asked is None else asked

    def listed(replicas: list[ReplicaView]) -> Response:
        clients = {name: frontend.client for name, frontend in serving.models.loaded().items()}
        several = {name: client for name, client in clients.items() if isinstance(client, ReplicaOperator)}
        scaled = {name: view for name, client in several.items() if (view := client.autoscaling()) is not None}
        pending = sum(client.pending for client in several.values())
        if serving.models.single_model:
            return answer(ReplicaList(replicas, pending=pending, autoscaling=next(iter(scaled.values()), None)))
        return answer(ReplicaList(replicas, pending=pending, autoscaling_by_model=scaled))

    one = "/v1/replicas/{id:path}"  # of several models, a replica is named like its model too, which may have slashes
    drained = answers(ReplicaView, takes=DrainBody)

    @routes.get("/v1/replicas", summary="The replicas and what each does", openapi_extra=answers(ReplicaList))
    async def replicas() -> Response:
        return listed(await all_replicas(serving))

    @routes.post("/v1/replicas/restart", summary="Rolling restart", openapi_extra=answers(ReplicaList, takes=DrainBody))
    async def restart_all(request: Request) -> Response:
        grace = await timeout(request)
        names = [name for name, one in serving.models.loaded().items() if isinstance(one.client, ReplicaOperator)]
        if not names:
            raise InputError(ONE_ENGINE)
        for name in names:
            with suppress(ReplicaNotFoundError), operated(name) as operator:  # of a model that is unloaded meanwhile
                await operator.rolling_restart(grace)
        return listed(await all_replicas(serving))

    @routes.post(one + "/drain", summary="Send a replica nothing new", openapi_extra=drained)
    async def drain(id: str, request: Request) -> Response:
        with found(id) as (operator, own, shown):
            return shown(await operator.drain(own, await timeout(request)))

    @routes.post(one + "/activate", summary="Route to a drained replica", openapi_extra=answers(ReplicaView))
    async def activate(id: str) -> Response:
        with found(id) as (operator, own, shown):
            return shown(operator.activate(own))

    @routes.post(
        one + "/role",
        summary="Prefill, decode or both",
        openapi_extra=answers(ReplicaView, takes=RoleBody),
    )
    async def role(id: str, request: Request) -> Response:
        asked = decode(msgspec.json.Decoder(RoleBody), await read_body(request, serving.max_body))
        with found(id) as (operator, own, shown):
            return shown(await operator.set_role(own, asked.role))

    @routes.post(one + "/restart", summary="Drain a replica and start it anew", openapi_extra=drained)
    async def restart(id: str, request: Request) -> Response:
        with found(id) as (operator, own, shown):
            return shown(await operator.restart(own, await timeout(request)))

    return routes
