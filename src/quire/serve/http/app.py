"""The applications: a public one with every API family, an admin one beside it, over the models of one server.

Routers are functions `router(serving) -> APIRouter`; adding one to a list below is all it takes, and it is behind the
gate like all others. Routes find the key, salt and request id of their request with `serve.context.current()`.
Refuses to know: sockets, signals, where the engine runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from quire.engine.model_pool import ModelPool
from quire.observe.energy import Energy
from quire.observe.ledger import Ledger
from quire.observe.metrics import Metrics
from quire.serve.anthropic import batch_routes as anthropic_batches
from quire.serve.anthropic import messages_api as anthropic
from quire.serve.core.api_keys import ADMIN, INFERENCE, KeyRing
from quire.serve.core.background_lanes import Lanes
from quire.serve.core.generation import Serving
from quire.serve.core.loop_lag import LagMonitor
from quire.serve.core.prepare_pool import PreparePool
from quire.serve.core.rate_limits import RequestAdmission
from quire.serve.core.server_state import OtherProcesses
from quire.serve.core.shared_counts import SharedCounts
from quire.serve.http.auth import Gate
from quire.serve.http.error_bodies import Guard, on_error
from quire.serve.http.openapi import install_schemas
from quire.serve.http.relay import Relay
from quire.serve.ollama import generate as ollama
from quire.serve.ollama import model_admin as ollama_files
from quire.serve.ollama import model_info as ollama_models
from quire.serve.openai import batches, completions, embeddings, lora_adapters, responses, scoring
from quire.serve.openai import chat_completions as chat
from quire.serve.openai import model_list as models
from quire.serve.openai import tokenize as tokens
from quire.serve.ops import cache_admin as cache
from quire.serve.ops import dashboard, health, loaded_models, replica_admin, tokenizer_info
from quire.serve.ops import explain_request as explain
from quire.serve.ops import live_view as live
from quire.serve.ops import sleep as power
from quire.serve.ops.request_spans import traced
from quire.types.errors import QuireError
from quire.types.serving import ServeOptions

if TYPE_CHECKING:
    from quire.engine.frontend import Frontend

logger = logging.getLogger("quire.serve")

QUEUE = 512  # requests that may wait beyond those that run at once: a burst that fits is not refused

# What API workers answer themselves, and how: all work that needs nothing but the engine.
WORKER_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"),
        *("/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank", "/classify"),
        *("/v1/messages", "/v1/messages/count_tokens"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
    }
)

Router = Callable[[Serving], APIRouter]

PUBLIC: list[Router] = [
    chat.router,
    completions.router,
    responses.router,
    embeddings.router,
    scoring.router,
    models.router,
    lora_adapters.router,
    batches.router,
    anthropic.router,
    anthropic_batches.router,
    ollama.router,
    ollama_models.router,
    ollama_files.router,
    tokens.router,
    tokenizer_info.router,
    health.router,
    health.metrics_router,
    explain.router,
    live.router,
    dashboard.router,
]
WORKER: list[Router] = [
    chat.router,
    completions.router,
    responses.router,
    embeddings.router,
    scoring.router,
    anthropic.router,
    ollama.router,
    ollama_models.router,
    tokens.router,
]
ADMIN_ONLY: list[Router] = [
    health.router,
    health.metrics_router,
    explain.router,
    live.router,
    dashboard.docs_router,
    power.router,
    loaded_models.router,
    replica_admin.router,
    cache.router,
    lora_adapters.router,
]


def create_serving(
    models: ModelPool | Frontend,
    options: ServeOptions | None = None,
    keys: KeyRing | None = None,
    *,
    counts: SharedCounts | None = None,
    workers: OtherProcesses | None = None,
    is_worker: bool = False,
) -> Serving:
    """What the routes of both applications share. Without keys, everything is open. `counts`: those of a server of
    several processes."""
    options = options or ServeOptions()
    if is_worker:
        options = replace(options, files=None)  # the folder is the main process's
    pool = models if isinstance(models, ModelPool) else ModelPool.of(models)
    info = pool.default.client.info
    energy = None if is_worker else Energy()
    if energy is not None and not energy.available:
        logger.info("no energy metrics: %s", "; ".join(energy.reasons))
    metrics = {name: Metrics(name, energy if not at else None) for at, name in enumerate(pool.names)}
    for name in pool.loaded():
        metrics[name].info = pool.loaded()[name].client.info
    admission = RequestAdmission(
        max_queue=options.max_queue or info.slots + QUEUE,
        max_queue_tokens=options.max_queue_tokens or 4 * info.pages * info.page_size,
        key_concurrency=options.key_concurrency,
        key_tokens_per_minute=options.key_tokens_per_minute,
        counts=counts or SharedCounts(),
    )
    return Serving(
        models=pool,
        metrics_by_model=metrics,
        ledger=traced(pool, Ledger(reports=is_worker), options.otlp_endpoint),
        options=options,
        keys=keys or KeyRing(),
        admission=admission,
        prepare_pool=PreparePool(options.prepare_workers, options.prepare_seconds),
        lanes=Lanes(admission, info),
        lag=LagMonitor(),
        created=int(time.time()),
        workers=workers,
        is_worker=is_worker,
    )


def create_app(serving: Serving) -> FastAPI:
    """The public API, for keys with the inference scope."""
    return _app(
        serving, INFERENCE, PUBLIC, "Quire", "LLM inference server that speaks OpenAI's, Anthropic's and Ollama's APIs."
    )


def create_worker_app(serving: Serving, main: Path) -> FastAPI:
    """The public API as an API worker has it: what it does not answer itself the main process does, behind `main`."""
    passing_on = partial(Relay, own=WORKER_PATHS, main=main)
    return _app(serving, INFERENCE, WORKER, "Quire API worker", "", passing_on)


def create_admin_app(serving: Serving) -> FastAPI:
    """What operators need and users must not reach, for keys with the admin scope."""
    return _app(serving, ADMIN, ADMIN_ONLY, "Quire admin", "Operating a Quire server.")


def _app(
    serving: Serving,
    scope: str,
    routers: list[Router],
    title: str,
    description: str,
    before: Callable[[ASGIApp], ASGIApp] | None = None,
) -> FastAPI:
    """`before`: what a request meets before the gate."""
    app = FastAPI(
        title=title,
        description=description,
        redirect_slashes=False,
        docs_url=None,  # pages of our own, which need nothing from elsewhere
        redoc_url=None,
        exception_handlers={QuireError: on_error, HTTPException: on_error, RequestValidationError: on_error},
    )
    app.add_middleware(Gate, serving=serving, scope=scope)
    if serving.options.origins and scope == INFERENCE:
        app.add_middleware(  # a preflight carries no key
            CORSMiddleware,
            allow_origins=serving.options.origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    if before is not None:
        app.add_middleware(before)
    app.add_middleware(Guard)  # added last, so outermost
    for router in routers:
        app.include_router(router(serving))
    install_schemas(app, strict=serving.options.strict_fields)
    return app
