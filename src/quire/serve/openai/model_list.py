"""GET /v1/models and /v1/models/{id}: the model being served, and its adapters. Refuses to know: any other."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter
from msgspec.structs import replace
from starlette.responses import Response

from quire.serve.core.context import current
from quire.serve.core.generation import Serving
from quire.serve.http.http_io import json
from quire.serve.http.openapi import answers
from quire.serve.openai.response_bodies import ModelCard, ModelList, ModelPermission


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])
    name, client = serving.frontend.model_name, serving.frontend.client
    base = ModelCard(
        id=name,
        created=serving.created,
        root=client.info.model,
        permission=[ModelPermission(id=f"modelperm-{serving.fingerprint[3:]}", created=serving.created)],
        display_name=name,
        created_at=datetime.fromtimestamp(serving.created, UTC).isoformat(),
        max_model_len=client.info.max_model_len,
    )

    def cards() -> dict[str, ModelCard]:
        """By name; an adapter's root is where it was loaded from, as vLLM has it."""
        adapters = [
            replace(base, id=one.name, root=one.path, parent=name, display_name=one.name) for one in client.adapters
        ]
        return {card.id: card for card in (base, *adapters)}

    @routes.get("/v1/models", summary="List models", openapi_extra=answers(ModelList))
    async def list_models() -> Response:
        data = list(cards().values())
        return Response(
            json(ModelList(data=data, first_id=data[0].id, last_id=data[-1].id)), media_type="application/json"
        )

    # A path, because names such as org/model hold slashes.
    @routes.get("/v1/models/{id:path}", summary="Describe a model", openapi_extra=answers(ModelCard))
    async def describe_model(id: str) -> Response:
        serving.check_model(id)
        return Response(json(cards()[current().lora or name]), media_type="application/json")

    return routes
