"""serve: the HTTP server over an engine in a process of its own, or over one for each of several models."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import typer

from quire.cli.model_report import fetch
from quire.cli.options import EngineCommand, with_engine_options, with_serve_options
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError
from quire.types.installed import too_old
from quire.types.serving import ServeOptions

if TYPE_CHECKING:
    from quire.engine.client import RestartPolicy
    from quire.engine.frontend import Frontend
    from quire.engine.model_pool import ModelPool

logger = logging.getLogger(__name__)
EXAMPLES = """
Examples:

quire serve qwen3:8b

quire serve org/name-GGUF:Q4_K_M --port 9000 --max-model-len 8192

quire serve org/name --host 0.0.0.0 --api-keys keys.toml

quire serve --models models.yaml --max-loaded-models 2
"""


def register(app: typer.Typer) -> None:
    app.command(cls=EngineCommand, epilog=EXAMPLES)(with_engine_options(split_help=True)(with_serve_options()(serve)))


def serve(*, context: typer.Context, engine: EngineOptions, serving: ServeOptions) -> None:
    """Serve a model over HTTP: OpenAI's, Anthropic's and Ollama's APIs."""
    from quire.engine.client import RestartPolicy
    from quire.serve import load_keys, run_server
    from quire.serve.core.context import current
    from quire.types.logs import configure

    configure(serving.log_format, serving.log_level, request_id=lambda: current().request_id)
    source = context.get_parameter_source("model")
    if serving.models is not None and source is not None and source.name == "COMMANDLINE":
        raise ConfigError(f"models are named in {serving.models}: leave out {engine.model.model!r}")
    for line in too_old().values():
        logger.warning("%s", line)
    keys = load_keys(serving.api_keys)
    policy = RestartPolicy(serving.heartbeat, serving.hang_timeout, serving.max_restarts)

    async def open_models() -> Frontend | ModelPool:
        if serving.models is None:
            return await open_model(engine, serving, policy)
        return await open_pool(engine, serving, policy)

    run_server(open_models, serving, keys=keys)


async def open_model(engine: EngineOptions, serving: ServeOptions, policy: RestartPolicy) -> Frontend | ModelPool:
    """One model."""
    from quire.assets import present
    from quire.cluster.open_cluster import open_cluster
    from quire.engine.frontend import Frontend
    from quire.engine.open_pool import open_one_model
    from quire.text import TextModel

    local = present(engine.model.model) or fetch(engine)  # here, where there is a terminal to show progress
    if serving.replicas is None:
        return await open_one_model(local, engine, serving, policy)
    client = await open_cluster(engine, serving, policy)
    text = TextModel.load(local, tool_call_parser=serving.tool_call_parser, reasoning_parser=serving.reasoning_parser)
    return Frontend(client, text, serving.served_model_name or local.name)


async def open_pool(engine: EngineOptions, serving: ServeOptions, policy: RestartPolicy) -> ModelPool:
    """Several models. Their files are fetched now, where there is a terminal to show progress."""
    from quire.assets import present
    from quire.cluster.open_cluster import PooledClusters
    from quire.engine.open_pool import open_model_pool
    from quire.types.models_file import parse_keep_alive, read_models_file

    assert serving.models is not None
    models = read_models_file(serving.models, engine, parse_keep_alive(serving.keep_alive), serving.ray_address)
    clusters = PooledClusters(models, serving, policy) if any(model.replicas for model in models) else None
    for model in models:
        if present(model.engine.model.model) is None:
            fetch(model.engine)
    return await open_model_pool(models, serving, policy, clusters)
