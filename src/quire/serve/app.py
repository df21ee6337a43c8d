"""The application: routes of every API family over one frontend.

Refuses to know: sockets, signals, where the engine runs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from quire.observe.metrics import Metrics
from quire.serve.anthropic import router as anthropic
from quire.serve.chat import router as chat
from quire.serve.completions import router as completions
from quire.serve.embeddings import router as embeddings
from quire.serve.errors import Guard, on_error
from quire.serve.generation import Serving
from quire.serve.health import router as health
from quire.serve.models import router as models
from quire.serve.ollama import router as ollama
from quire.serve.ollama_models import router as ollama_models
from quire.serve.openapi import install_schemas
from quire.serve.tokens import router as tokens
from quire.types.errors import QuireError

if TYPE_CHECKING:
    from quire.engine.frontend import Frontend

MAX_BODY = 16 << 20  # bytes of one request body


def create_app(frontend: Frontend, *, max_body: int = MAX_BODY) -> FastAPI:
    """A server for `frontend`, whose client it closes when it shuts down."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await frontend.client.close()

    serving = Serving(
        frontend=frontend,
        metrics=Metrics(frontend.model_name),
        fingerprint=fingerprint(frontend),
        created=int(time.time()),
        max_body=max_body,
    )
    app = FastAPI(
        title="Quire",
        description="LLM inference server with OpenAI-compatible APIs.",
        lifespan=lifespan,
        redirect_slashes=False,
        exception_handlers={QuireError: on_error, HTTPException: on_error},
    )
    app.add_middleware(Guard)
    for family in (chat, completions, models, embeddings, tokens, anthropic, ollama, ollama_models, health):
        app.include_router(family(serving))
    install_schemas(app)
    return app


def fingerprint(frontend: Frontend) -> str:
    """Equal as long as what computes the answers is equal: the model, its precision and its device."""
    info = frontend.client.info
    facts = f"{frontend.model_name}|{info.model}|{info.dtype}|{info.device}|{info.vocab_size}"
    return "fp_" + hashlib.sha256(facts.encode()).hexdigest()[:12]
