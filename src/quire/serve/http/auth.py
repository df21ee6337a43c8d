"""Authentication, plain ASGI in front of all routes: nothing passes that it was not told to let pass.

Denies by default: a path needs a key unless it is listed here, whether a route stands behind it or not. Work (every
POST of the public API) also needs a place from admission, and gives it back when the response has ended, be it a
stream, an error or a client that hung up. Refuses to know: bodies, routes, API families.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.serve.core import prepare_pool as prepare_pool
from quire.serve.core.api_keys import ADMIN, INFERENCE, Key
from quire.serve.core.context import Context, current, enter
from quire.serve.http.error_bodies import describe
from quire.serve.http.http_io import until_gone
from quire.types.errors import ForbiddenError, InputError, QuireError

if TYPE_CHECKING:
    from quire.serve.core.generation import Serving

# What anybody may read: no data, only whether the server is there, and the files of the dashboard.
OPEN_PATHS = frozenset({"/", "/docs", "/health", "/ready", "/ping", "/favicon.ico"})
OPEN_UNDER = ("/dashboard/",)
# What needs the admin scope on the public port too.
ADMIN_PATHS = frozenset(
    {
        *("/metrics", "/view", "/api/pull", "/api/copy", "/api/delete"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    }
)


class Gate:
    def __init__(self, app: ASGIApp, serving: Serving, scope: str):
        self.app = app
        self.serving = serving
        self.scope = scope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        try:
            context = self._let_in(scope)
        except QuireError as error:
            response = describe(error).response(scope["path"])
            response.headers["connection"] = "close"  # nobody reads the body that may follow
            await response(scope, receive, send)
            return
        context.until_gone = partial(until_gone, receive)
        enter(context)
        prepare_pool.enter(self.serving.prepare_pool)
        try:
            await self.app(scope, receive, _naming_ignored(context, send))
        finally:
            context.release_model()
            if context.permit is not None:
                self.serving.admission.leave(context.permit)

    def _let_in(self, scope: Scope) -> Context:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        path, method = scope["path"], scope["method"]
        if not path.isprintable():  # routes overlook a line's end, comparisons do not
            raise InputError("a path has printable characters only")
        keys = self.serving.keys
        if keys.open:
            check_origin(headers, self.serving.options.origins)
        elif not (method in ("GET", "HEAD") and (path in OPEN_PATHS or path.startswith(OPEN_UNDER))):
            key = keys.find(presented(headers))
            wanted = ADMIN if path in ADMIN_PATHS else self.scope
            if wanted not in key.scopes:
                raise ForbiddenError(f"key {key.name!r} lacks the scope {wanted!r} that {path} needs")
            return self._context(scope, key)
        return self._context(scope, keys.find(None) if keys.open else Key("anybody", scopes=frozenset()))

    def _context(self, scope: Scope, key: Key) -> Context:
        works = self.scope == INFERENCE and scope["method"] == "POST"
        return context_of(self.serving, key, scope["quire.request_id"], dict(scope["headers"]), works=works)


def _naming_ignored(context: Context, send: Send) -> Send:
    """`send`, but that a response says which fields of the request were left out."""

    async def named(message: Message) -> None:
        if context.ignored and message["type"] == "http.response.start":
            names = ", ".join(sorted(context.ignored)).encode("latin-1")
            message["headers"] = [*message.get("headers", ()), (b"x-quire-ignored-fields", names)]
        await send(message)

    return named


def salt_of(serving: Serving, key: Key) -> str:
    """What keeps a key's cached prefixes apart from others', from start to start."""
    if serving.keys.open or not serving.options.cache_salt:
        return ""
    return hashlib.blake2b(key.name.encode(), key=key.digest, digest_size=16).hexdigest()


def context_of(serving: Serving, key: Key, request_id: str, headers: dict[bytes, bytes], *, works: bool) -> Context:
    """What is known of a request that `key` let in; if it `works`, with a place from admission."""
    traceparent = headers.get(b"traceparent", b"")[:128].decode("latin-1")
    salt, strict = salt_of(serving, key), serving.options.strict_fields
    context = Context(request_id, key, salt, traceparent=traceparent, strict_fields=strict)
    if works:
        serving.check_entry()
        context.permit = serving.admission.enter(key)
    return context


@contextmanager
def own_place(serving: Serving) -> Iterator[None]:
    """For work that goes on after the request that ordered it (a line of a batch): a place of its own under the same
    key's limits, behind what others wait for, and no model yet. To be entered in a task of its own, whose context it
    changes."""
    permit = serving.admission.enter(current().key, background=True)
    context = replace(current(), permit=permit, lease=None, until_gone=None)
    enter(context)
    try:
        yield
    finally:
        context.release_model()
        assert context.permit is not None
        serving.admission.leave(context.permit)


def presented(headers: dict[bytes, bytes]) -> str | None:
    """The key a request carries, as OpenAI's or as Anthropic's clients send it."""
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    secret = value.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    return secret.decode("latin-1") or None


def check_origin(headers: dict[bytes, bytes], welcome: Sequence[str] = ()) -> None:
    """Without keys, loopback is the only wall, and browsers stand inside it: pages of other sites must not reach
    through them, neither directly (Origin, unless it is `welcome`) nor under a name they own that resolves to this
    machine (Host)."""
    here = "//" + headers.get(b"host", b"localhost").decode("latin-1")
    host = _hostname(here)
    if not (_is_local(host) or _address(host)):
        raise ForbiddenError(
            f"without API keys this server does not answer to the name {host[:64]!r}; "
            "set API keys, or call it by its IP address or as localhost"
        )
    if (origin := headers.get(b"origin")) is None:
        return
    site = origin.decode("latin-1")
    if site in welcome:
        return
    if not _is_local(_hostname(site)) and site.partition(":")[2].lower() != here.lower():
        raise ForbiddenError("without API keys this server does not answer pages of other sites")


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_local(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or host.endswith(".localhost") or (address is not None and address.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
