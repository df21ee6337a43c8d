"""serve: the HTTP server over an engine in a process of its own."""

from __future__ import annotations

import logging

import typer

from quire.cli.model_report import fetch
from quire.cli.options import EngineCommand, with_engine_options, with_serve_options
from quire.types.config import EngineOptions
from quire.types.installed import too_old
from quire.types.seams import EngineClient
from quire.types.serving import ServeOptions

logger = logging.getLogger(__name__)
EXAMPLES = """
Examples:

quire serve qwen3:8b

quire serve org/name-GGUF:Q4_K_M --port 9000 --max-model-len 8192

quire serve org/name --host 0.0.0.0 --api-keys keys.toml
"""


def register(app: typer.Typer) -> None:
    app.command(cls=EngineCommand, epilog=EXAMPLES)(with_engine_options(split_help=True)(with_serve_options()(serve)))


def serve(*, engine: EngineOptions, serving: ServeOptions) -> None:
    """Serve a model over HTTP: OpenAI's, Anthropic's and Ollama's APIs."""
    from quire.assets import present
    from quire.cluster.open_cluster import open_cluster
    from quire.engine.client import AsyncClient, RestartPolicy
    from quire.engine.frontend import Frontend
    from quire.serve import load_keys, run_server
    from quire.serve.core.context import current
    from quire.text import TextModel
    from quire.types.logs import configure

    configure(serving.log_format, serving.log_level, request_id=lambda: current().request_id)
    for line in too_old().values():
        logger.warning("%s", line)
    keys = load_keys(serving.api_keys)

    async def open_frontend() -> Frontend:
        local = present(engine.model.model) or fetch(engine)  # here, where there is a terminal to show progress
        policy = RestartPolicy(serving.heartbeat, serving.hang_timeout, serving.max_restarts)
        client: EngineClient
        if serving.replicas is None:
            client = await AsyncClient.open(engine, process=True, policy=policy)
        else:
            client = await open_cluster(engine, serving, policy)
        text = TextModel.load(
            local, tool_call_parser=serving.tool_call_parser, reasoning_parser=serving.reasoning_parser
        )
        return Frontend(client, text, serving.served_model_name or local.name)

    run_server(open_frontend, serving, keys=keys)
