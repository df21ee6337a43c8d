"""Running the server: take the ports, build the engine, say where it listens, serve, leave in good order.

    SIGTERM ──► draining: new work is refused, /ready says no ──► all answered, or grace is over ──► closed
                                                              ──► a second SIGTERM: the rest is ended ──┘

Refuses to know: routes, engines (it is handed a function that builds the frontend).
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import ipaddress
import json
import logging
import shlex
import signal
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from quire.serve.core.api_keys import ADMIN, INFERENCE, KeyRing
from quire.serve.grpc.service import RpcServer
from quire.serve.http.app import create_admin_app, create_app, create_serving
from quire.serve.http.bounded_server import BACKLOG, LAST_WORDS, Server, run_loop
from quire.serve.workers.supervisor import ApiWorkers
from quire.types.errors import ConfigError, QuireError
from quire.types.grammar import GrammarSpec
from quire.types.serving import ServeOptions

if TYPE_CHECKING:
    from quire.engine.frontend import Frontend
    from quire.engine.model_pool import ModelPool
    from quire.serve.core.generation import Serving

# One model that stays, or several.
FrontendFactory = Callable[[], "Frontend | ModelPool | Awaitable[Frontend | ModelPool]"]

logger = logging.getLogger("quire.serve")


class ServerUrl(str):
    """Where the API listens; `admin` is where the admin API does."""

    admin: str
    grpc_port: int | None = None  # where gRPC is served, if it is

    @classmethod
    def of(cls, public: socket.socket, admin: socket.socket, *rpc: socket.socket, scheme: str = "http") -> ServerUrl:
        url = cls(url_of(public, scheme))
        url.admin = url_of(admin, scheme)
        url.grpc_port = next((listener.getsockname()[1] for listener in rpc), None)
        return url


def run_server(
    frontend_factory: FrontendFactory,
    options: ServeOptions | None = None,
    *,
    keys: KeyRing | None = None,
    announce: Callable[[ServerUrl, str, bool], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; open requests then have `options.grace` seconds to finish. Raises what ended
    the engine if it could not be brought back.

    Ports and the folder of files are taken before the factory runs: what is wrong with them is known before a model is
    loaded. `announce` is called once, with the URL, the model's name and whether a key is needed, when requests are
    welcome.
    """
    options, keys = options or ServeOptions(), keys or KeyRing()
    if options.files:
        try:
            Path(options.files).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"files: {options.files} is no folder to keep them in: {error.strerror}") from None
    with listening(options, keys) as (listeners, url):
        welcome = announce or print_welcome

        def ready(life: Life) -> None:
            gc.collect()
            gc.freeze()  # what lives now stays: no stream waits while it is searched for garbage
            welcome(url, life.serving.frontend.model_name, not keys.open)

        _run(frontend_factory, options, keys, listeners, ready)


@contextmanager
def background_server(
    frontend_factory: FrontendFactory, options: ServeOptions | None = None, *, keys: KeyRing | None = None
) -> Iterator[ServerUrl]:
    """A server in a thread of this process for as long as the block lasts; gives its URL."""
    started: Future[Life] = Future()
    options, keys = options or ServeOptions(port=0, grace=1), keys or KeyRing()

    def work() -> None:
        try:
            _run(frontend_factory, options, keys, listeners, started.set_result)
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    with listening(options, keys) as (listeners, url):
        thread = threading.Thread(target=work, name="quire-server", daemon=True)
        thread.start()
        life = started.result()
        try:
            yield url
        finally:
            with suppress(RuntimeError):  # it may have ended by itself, and its loop with it
                life.loop.call_soon_threadsafe(life.stop)
            thread.join()


def _run(
    frontend_factory: FrontendFactory,
    options: ServeOptions,
    keys: KeyRing,
    listeners: list[socket.socket],
    ready: Callable[[Life], None],
) -> None:
    async def serve() -> None:
        with _sigterm_ends_the_start():
            built = frontend_factory()
            models = await built if inspect.isawaitable(built) else built
        if options.api_workers == 1:
            await Life(create_serving(models, options, keys)).run(listeners, ready)
            return
        with closing(ApiWorkers(options, keys)) as workers:
            serving = create_serving(models, options, keys, counts=workers.counts, workers=workers)
            await Life(serving, workers).run(listeners, ready)

    run_loop(serve())


@contextmanager
def _sigterm_ends_the_start() -> Iterator[None]:
    """What was begun is undone, as after Ctrl-C; left to itself the signal would end this process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        logger.info("told to stop before the server was up")
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Life:
    """From the first request to the last: two servers on one loop, how they stop, and what they leave behind. With
    `workers`, these answer the API's port, and the public server here what they pass on."""

    def __init__(self, serving: Serving, workers: ApiWorkers | None = None):
        self.serving = serving
        self.workers = workers
        self.loop = asyncio.get_running_loop()
        public = Server(create_app(serving), serving.options, behind=workers is not None)
        self.servers = [public, Server(create_admin_app(serving), serving.options)]
        self._rpc = RpcServer(serving) if serving.options.grpc_port is not None else None
        self._stops = 0
        self._end: asyncio.Task[None] | None = None

    async def run(self, listeners: list[socket.socket], ready: Callable[[Life], None]) -> None:
        """Serve until stopped; raises the engine's error if it is lost for good. The third listener is gRPC's."""
        models = self.serving.models
        lag = asyncio.ensure_future(self.serving.lag.run())
        lost = asyncio.ensure_future(models.lost())
        lost.add_done_callback(lambda lost: None if lost.cancelled() else self.stop())
        try:
            with self._signals():
                public = listeners[0] if self.workers is None else self.workers.listener
                pairs = zip(self.servers, (public, listeners[1]), strict=True)
                serving = asyncio.gather(*(server.serve([listener]) for server, listener in pairs))
                for server in self.servers:
                    await server.up.wait()
                if self._rpc is not None:
                    await self._rpc.start(listeners[2])
                if self.workers is None or await self._start(self.workers, listeners[0], serving):
                    ready(self)
                threading.Thread(target=self._warm_up, name="quire-warm-up", daemon=True).start()
                await serving
            if lost.done():
                raise lost.result()
        finally:
            lost.cancel()
            lag.cancel()
            if self._rpc is not None:
                await self._rpc.stop(LAST_WORDS)
            if self.workers is not None:
                await self.workers.stop()
            self.serving.prepare_pool.close()
            await models.close()
            logger.info("shut down")

    async def _start(self, workers: ApiWorkers, listener: socket.socket, serving: asyncio.Future[Any]) -> bool:
        """Whether the workers answer; False: the server was told to stop before."""
        starting = asyncio.ensure_future(workers.start(self.serving, listener))
        await asyncio.wait((starting, serving), return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and starting.exception() is not None:
            self._exit()
            await serving
            starting.result()
        return not starting.cancel()

    def _warm_up(self) -> None:
        """Start the process that tries grammars, so that the first one does not wait for it."""
        with suppress(QuireError):  # whoever sends a grammar is told
            self.serving.frontend.check_grammar(GrammarSpec("json_object"))

    def stop(self) -> None:
        """Begin to drain; a second time, end what is open; a third time, leave it as it is."""
        self._stops += 1
        if self._end is None:
            self._end = asyncio.ensure_future(self._drained())
        elif self._stops == 2:
            logger.warning("told to stop a second time; requests that are cut off: %d", self.serving.admission.inflight)
            self._end.cancel()
            self._end = asyncio.ensure_future(self._cut_off())
        else:
            self._exit(force=True)

    async def _drained(self) -> None:
        admission, options, models = self.serving.admission, self.serving.options, self.serving.models
        admission.draining = True
        logger.info("shutting down; requests that are finishing: %d", admission.inflight)
        try:
            await asyncio.wait_for(admission.idle(), options.grace if models.trouble() is None else LAST_WORDS)
        except TimeoutError:
            logger.warning("%d requests had not finished within the grace period", admission.inflight)
            await self._cut_off()
        else:
            self._exit()

    async def _cut_off(self) -> None:
        if self.workers is not None:
            self.workers.cut_off()
        await self.serving.models.close()  # ends requests, each with an error its client can read
        with suppress(TimeoutError):
            await asyncio.wait_for(self.serving.admission.idle(), LAST_WORDS)
        self._exit()

    def _exit(self, force: bool = False) -> None:
        for server in self.servers:
            server.should_exit = True
            server.force_exit = force

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may; a server elsewhere ends by stop()
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            self.loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in signals:
                self.loop.remove_signal_handler(number)


@contextmanager
def listening(options: ServeOptions, keys: KeyRing) -> Iterator[tuple[list[socket.socket], ServerUrl]]:
    """All listeners (of the API, of its administration, of gRPC if it is served), checked against who could reach
    them."""
    check_certificate(options)
    ports = [(options.host, options.port, "--port", INFERENCE)]
    ports.append((options.admin_host, options.admin_port_wanted, "--admin-port", ADMIN))
    if options.grpc_port is not None:
        ports.append((options.host, options.grpc_port, "--grpc-port", INFERENCE))
    with ExitStack() as stack:
        listeners: list[socket.socket] = []
        for host, port, flag, scope in ports:
            listeners.append(stack.enter_context(listen(host, port, flag)))
            check_exposure(listeners[-1], options, keys, scope)
        yield listeners, ServerUrl.of(*listeners, scheme="https" if options.ssl_certfile else "http")


def check_certificate(options: ServeOptions) -> None:
    """Raises where the server could not use it: known before a model is loaded. A key under a password is one such."""
    if options.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password="")
    except (OSError, ValueError) as error:  # ssl's errors are OSErrors
        pair = f"{options.ssl_certfile} with the key {options.ssl_keyfile}"
        raise ConfigError(f"cannot use the certificate {pair}: {error}") from None


def check_exposure(listener: socket.socket, options: ServeOptions, keys: KeyRing, scope: str) -> None:
    """Refuse to stand open to others by accident."""
    host = listener.getsockname()[0]
    if keys.open and "*" in options.origins:
        raise ConfigError("--cors '*' would let every web page use a server without API keys; name the origins")
    if keys.open and not options.allow_open and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        raise ConfigError(
            f"{host} can be reached from other machines and no API keys are set; give keys (--api-keys FILE, made by "
            f"`quire keys new NAME --scope {scope}`), listen on 127.0.0.1, or say --allow-open"
        )


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
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
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}; host is an address of this machine") from None
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error}; free the port or choose another ({flag} N, 0 for any)"
        ) from None
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Where a client on this machine reaches the listener."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def print_welcome(url: ServerUrl, model: str, locked: bool) -> None:
    question = {"role": "user", "content": "What is gravity?"}
    body = {"model": model, "messages": [question], "max_tokens": 64, "temperature": 0}
    rpc = f"; gRPC: port {url.grpc_port}" if url.grpc_port is not None else ""
    key = '-H "Authorization: Bearer $QUIRE_API_KEY" ' if locked else ""
    print(f"Quire serves {model} at {url}  (API pages: {url}/docs; admin: {url.admin}{rpc}; stop: Ctrl-C)\n")
    print("Open it in a browser, or try:\n")
    data = shlex.quote(json.dumps(body))
    print(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' {key}-d {data}\n", flush=True)
