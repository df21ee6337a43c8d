"""Running the server: take the port, build the engine, say where it listens, serve, leave in good order.

Refuses to know: routes, engines (it is handed a function that builds the frontend).
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import shlex
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from quire.serve.app import create_app
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.engine.frontend import Frontend

FrontendFactory = Callable[[], "Frontend | Awaitable[Frontend]"]

BACKLOG = 2048  # connections that may wait to be accepted
KEEP_ALIVE = 75  # seconds an idle connection stays open


def run_server(
    frontend_factory: FrontendFactory,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    grace: int = 30,
    announce: Callable[[str, str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; open streams then have `grace` seconds to finish.

    The port is taken before the factory runs, so a taken port is known before a model is loaded. `announce` is
    called once, with the URL and the model's name, when requests are welcome.
    """
    with listen(host, port) as listener:
        welcome = announce or print_welcome
        _run(frontend_factory, listener, grace, lambda server: welcome(url_of(listener), server.model_name))


@contextmanager
def background_server(frontend_factory: FrontendFactory, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """A server in a thread of this process for as long as the block lasts; gives its URL."""
    started: Future[Server] = Future()

    def work() -> None:
        try:
            _run(frontend_factory, listener, 1, started.set_result)
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    with listen(host, port) as listener:
        thread = threading.Thread(target=work, name="quire-server", daemon=True)
        thread.start()
        server = started.result()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join()


def _run(
    frontend_factory: FrontendFactory, listener: socket.socket, grace: int, ready: Callable[[Server], None]
) -> None:
    async def serve() -> None:
        built = frontend_factory()
        frontend = await built if inspect.isawaitable(built) else built
        await Server(frontend, grace, ready).serve([listener])

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve())


class Server(uvicorn.Server):
    """uvicorn, told whom to tell when it is ready, and ending a signalled life by returning: uvicorn itself would
    raise the signal again, which kills the process before its owner has cleaned up."""

    def __init__(self, frontend: Frontend, grace: int, ready: Callable[[Server], None]):
        super().__init__(
            uvicorn.Config(
                create_app(frontend),
                http="httptools" if importlib.util.find_spec("httptools") else "h11",
                ws="none",
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=grace,
            )
        )
        self.model_name = frontend.model_name
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready(self)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may; a server elsewhere ends by should_exit
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on the address (port 0: any free one), or an error that says what to do."""
    if not 0 <= port <= 65535:  # the resolver would take it modulo 65536
        raise ConfigError(f"cannot listen on port {port}: ports go from 0 (any free one) to 65535")
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # At once: two sockets may be bound to one port as long as neither listens.
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error}; free the port or choose another (--port N, 0 for any)"
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine reaches the listener."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def print_welcome(url: str, model: str) -> None:
    question = {"role": "user", "content": "What is gravity?"}
    body = {"model": model, "messages": [question], "max_tokens": 64, "temperature": 0}
    print(f"Quire serves {model} at {url}  (API pages: {url}/docs; stop: Ctrl-C)\n\nTry it:\n")
    print(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}\n")
    print(end="", flush=True)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    if importlib.util.find_spec("uvloop"):
        import uvloop

        return uvloop.new_event_loop
    return asyncio.new_event_loop
