"""GET /tokenizer_info: the model's special tokens and its chat template, as vLLM tells them.

Refuses to know: requests, the engine.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from quire.serve.core.generation import Serving
from quire.serve.http.http_io import json


def described(serving: Serving) -> dict[str, Any]:
    """Named tokens (bos_token, ...) and their ids, special tokens by id, the template."""
    text = serving.frontend.text
    tokenizer = text.tokenizer
    special = {token: tokenizer.token_text(token) for token in sorted(tokenizer.special_ids)}
    ids = {name: token for token, name in special.items()}
    named = dict(tokenizer.named)
    return {
        "tokenizer_class": type(tokenizer).__name__,
        **named,
        **{f"{role}_id": ids[name] for role, name in named.items() if name in ids},
        "eos_token_ids": sorted(tokenizer.eos_ids),
        "added_tokens_decoder": {str(token): {"content": name, "special": True} for token, name in special.items()},
        "vocab_size": serving.frontend.client.info.vocab_size,
        "model_max_length": serving.frontend.client.info.max_model_len,
        "chat_template": text.template,
    }


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["tokens"])

    @routes.get("/tokenizer_info", summary="The tokenizer's special tokens and chat template")
    async def tokenizer_info(model: str | None = None) -> Response:
        await serving.use_model(model, engine=False)
        return Response(json(described(serving)), media_type="application/json")

    return routes
