"""GET /v1/models and /v1/models/{id}: the models that are served, and their adapters. Refuses to know: any other."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from fastapi import APIRouter
from msgspec import UNSET
from msgspec.structs import replace
from starlette.responses import Response

from quire.serve.core.generation import Serving
from quire.serve.core.model_facts import facts_of
from quire.serve.http.http_io import json
from quire.serve.http.openapi import answers
from quire.serve.openai.response_bodies import ModelCard, ModelList, ModelPermission


async def cards_of(serving: Serving, model: str) -> list[ModelCard]:
    """Of a model and its adapters; an adapter's root is where it was loaded from, as vLLM has it."""
    facts, pool = await facts_of(serving, model), serving.models
    digest = hashlib.sha256(f"{model}|{serving.created}".encode()).hexdigest()[:12]
    base = ModelCard(
        id=model,
        created=serving.created,
        root=facts.model,
        permission=[ModelPermission(id=f"modelperm-{digest}", created=serving.created)],
        display_name=model,
        created_at=datetime.fromtimestamp(serving.created, UTC).isoformat(),
        max_model_len=facts.max_model_len,
        loaded=UNSET if pool.single_model else model in pool.loaded(),
    )
    adapters = [
        replace(base, id=one.name, root=one.path, parent=model, display_name=one.name) for one in pool.adapters(model)
    ]
    return [base, *adapters]


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    @routes.get("/v1/models", summary="List models", openapi_extra=answers(ModelList))
    async def list_models() -> Response:
        data = [card for name in serving.models.names for card in await cards_of(serving, name)]
        return Response(
            json(ModelList(data=data, first_id=data[0].id, last_id=data[-1].id)), media_type="application/json"
        )

    # A path, because names such as org/model hold slashes.
    @routes.get("/v1/models/{id:path}", summary="Describe a model", openapi_extra=answers(ModelCard))
    async def describe_model(id: str) -> Response:
        model, adapter = serving.find_model(id)
        [found] = [card for card in await cards_of(serving, model) if card.id == (adapter or model)]
        return Response(json(found), media_type="application/json")

    return routes
