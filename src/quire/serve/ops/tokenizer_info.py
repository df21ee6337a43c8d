"""GET /tokenizer_info: the model's special tokens and its chat template, as vLLM tells them.

Refuses to know: requests, the engine.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from quire.serve.core.generation import Serving
from quire.serve.core.model_facts import ModelFacts, facts_of, text_of
from quire.serve.http.http_io import json
from quire.text import TextModel


def described(facts: ModelFacts, text: TextModel) -> dict[str, Any]:
    """Named tokens (bos_token, ...) and their ids, special tokens by id, the template."""
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
        "vocab_size": facts.vocab_size or tokenizer.vocab_size,
        "model_max_length": facts.max_model_len,
        "chat_template": text.template,
    }


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["tokens"])

    @routes.get("/tokenizer_info", summary="The tokenizer's special tokens and chat template")
    async def tokenizer_info(model: str | None = None) -> Response:
        facts = await facts_of(serving, serving.find_model(model)[0])
        return Response(json(described(facts, await text_of(facts))), media_type="application/json")

    return routes
