"""GET /v1/models and /v1/models/{id}. Refuses to know: any model but the one being served."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.responses import Response

from quire.serve.core.generation import Serving
from quire.serve.http.http_io import json
from quire.serve.http.openapi import answers
from quire.serve.openai.response_bodies import ModelCard, ModelList, ModelPermission


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])
    name = serving.frontend.model_name
    card = ModelCard(
        id=name,
        created=serving.created,
        root=serving.frontend.client.info.model,
        permission=[ModelPermission(id=f"modelperm-{serving.fingerprint[3:]}", created=serving.created)],
        display_name=name,
        created_at=datetime.fromtimestamp(serving.created, UTC).isoformat(),
        max_model_len=serving.frontend.client.info.max_model_len,
    )

    @routes.get("/v1/models", summary="List models", openapi_extra=answers(ModelList))
    async def list_models() -> Response:
        return Response(json(ModelList(data=[card], first_id=name, last_id=name)), media_type="application/json")

    # A path, because names such as org/model hold slashes.
    @routes.get("/v1/models/{id:path}", summary="Describe a model", openapi_extra=answers(ModelCard))
    async def describe_model(id: str) -> Response:
        serving.check_model(id)
        return Response(json(card), media_type="application/json")

    return routes
