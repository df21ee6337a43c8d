"""uvicorn within bounds, and the loop that it runs on: what every process that speaks HTTP here has in common.

Refuses to know: applications, who listens, when to stop.
"""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from quire.serve.http.bounded_protocol import BoundedProtocol, bounded_protocol
from quire.types.serving import ServeOptions

BACKLOG = 2048  # connections that may wait to be accepted
KEEP_ALIVE = 75  # seconds an idle connection stays open
LAST_WORDS = 2  # seconds for the last bytes of answers to leave
MORE_HEADER = 1024  # bytes that a relay may add to a head within bounds
SWITCH_INTERVAL = 0.001  # seconds a thread may keep the interpreter: templates must not hold up streams


class Server(uvicorn.Server):
    """uvicorn within bounds, saying when it is up, and leaving signals to others. `behind`: another server, which has
    TLS and looks at bounds."""

    def __init__(self, app: ASGIApp, options: ServeOptions, *, behind: bool = False):
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded_protocol(options.header_bytes + MORE_HEADER * behind, options.max_connections),
                ws="none",
                lifespan="on",
                log_config=None,  # its lines are like all others
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=LAST_WORDS,
                ssl_certfile=None if behind else options.ssl_certfile,
                ssl_keyfile=None if behind else options.ssl_keyfile,
            )
        )
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.lifespan.shutdown(), LAST_WORDS)  # uvicorn leaves it out if it is forced

    def new_protocol(self) -> BoundedProtocol:
        """For a connection that another process accepted."""
        protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        assert isinstance(protocol, BoundedProtocol)
        return protocol

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run what speaks HTTP."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(main)
    finally:
        sys.setswitchinterval(interval)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    if importlib.util.find_spec("uvloop"):
        import uvloop

        return uvloop.new_event_loop
    return asyncio.new_event_loop
