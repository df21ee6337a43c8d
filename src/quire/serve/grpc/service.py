"""The gRPC service: generate, embed and health over the same engine, keys and limits as HTTP.

grpcio is an extra and imported only when a server is started. Refuses to know: HTTP, how tokens are made.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from quire.serve.core import prepare_pool as prepare_pool
from quire.serve.core.context import Context, enter
from quire.serve.core.embedding import embed
from quire.serve.core.generation import Generation, Serving, Usage, hold_session, naming, off_loop, preparing
from quire.serve.core.turns import Talk, start
from quire.serve.grpc.frame_gate import FrameGate
from quire.serve.grpc.proto import SERVICE, load_messages
from quire.serve.grpc.rpc_bodies import blend_of, params_of, turn_of
from quire.serve.http.auth import context_of
from quire.serve.http.error_bodies import describe, request_id_of
from quire.text.segments import CallBegun, Said, Thought
from quire.types.errors import ConfigError, InputError
from quire.types.outputs import Delta
from quire.types.request import MAX_HOLD, Request

HEALTH_INTERVAL = 0.5  # seconds between looks at the engine
MAX_INPUTS = 1024  # of one Embed call
MAX_STREAMS = 100  # calls at once of one connection
WINDOW_BYTES = 1 << 18  # of a message that may be on its way unread
MAX_METADATA = 1 << 14  # bytes of a call's, as grpc counts them: 32 more for each field
IDLE = 300.0  # seconds that a connection without a call stays open
# HTTP status of an error → gRPC's name for it
CODES = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED", 413: "RESOURCE_EXHAUSTED", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE",
}  # fmt: skip


class RpcServer:
    """A gRPC server beside the HTTP ones; `start` it on their loop."""

    def __init__(self, serving: Serving):
        try:
            import grpc.aio
            from grpc_health.v1 import health, health_pb2, health_pb2_grpc

            from quire.serve.grpc.key_interceptor import KeyInterceptor
        except ImportError as error:
            raise ConfigError(f"gRPC needs {error.name}, which is not installed; pip install 'quire[grpc]'") from None
        self._serving = serving
        metadata = min(serving.options.header_bytes, MAX_METADATA)
        self._statuses = health_pb2.HealthCheckResponse
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", serving.max_body),
                ("grpc.max_metadata_size", metadata),
                ("grpc.absolute_max_metadata_size", metadata),
                ("grpc.max_concurrent_streams", MAX_STREAMS),
                ("grpc.http2.bdp_probe", 0),  # which lets windows grow to megabytes, of messages that nobody reads too
                ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
                ("grpc.max_connection_idle_ms", int(IDLE * 1000)),
            ],
            maximum_concurrent_rpcs=serving.options.max_connections,
            interceptors=(KeyInterceptor(serving.keys, SERVICE),),
        )
        self._folder = tempfile.TemporaryDirectory(prefix="quire-grpc-")  # for its owner alone
        options = serving.options
        self._gate = FrameGate(f"{self._folder.name}/grpc", options.header_bytes, options.max_connections)
        calls = Calls(serving)
        messages = calls.messages
        handlers = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                calls.generate, messages["GenerateRequest"].FromString, messages["GenerateResponse"].SerializeToString
            ),
            "Embed": grpc.unary_unary_rpc_method_handler(
                calls.embed, messages["EmbedRequest"].FromString, messages["EmbedResponse"].SerializeToString
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._watch: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve whoever connects there."""
        tls = self._tls()
        self._server.add_insecure_port(f"unix:{self._gate.path}")
        await self._server.start()
        await self._gate.start(listener, tls)
        self._watch = asyncio.create_task(self._report())

    def _tls(self) -> ssl.SSLContext | None:
        """None: it is not spoken."""
        options = self._serving.options
        if options.grpc_cert is None or options.grpc_key is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["h2"])
        try:
            context.load_cert_chain(options.grpc_cert, options.grpc_key)
        except OSError as error:  # what is wrong in the files among it
            raise ConfigError(f"cannot use the certificate and key of gRPC: {error}") from None
        return context

    async def stop(self, grace: float) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._gate.close()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)
        self._gate.abort()
        self._folder.cleanup()

    async def _report(self) -> None:
        """Keep the health service truthful."""
        while True:
            well = self._serving.models.trouble() is None and not self._serving.admission.draining
            for service in ("", SERVICE):
                await self._health.set(service, self._statuses.SERVING if well else self._statuses.NOT_SERVING)
            await asyncio.sleep(HEALTH_INTERVAL)


class Calls:
    """What a call does."""

    def __init__(self, serving: Serving):
        self.serving = serving
        self.messages = load_messages()

    async def generate(self, body: Any, call: Any) -> AsyncGenerator[Any, None]:
        arrived = time.perf_counter()
        async with self._inside(call):
            await self.serving.use_model(body.model or None)
            id = f"rpc-{uuid.uuid4().hex}"
            deadline = _deadline(body, call)
            talk = await self._talk(body, id, arrived, deadline)
            hold_session(body.session_id, _ttl(body.session_ttl))
            generation = talk.generation if talk is not None else await self._generation(body, id, arrived, deadline)
            response = self.messages["GenerateResponse"]
            async with aclosing(generation.deltas()) as batches:
                async for deltas in batches:
                    for delta in deltas:
                        yield response(id=id, chunk=self._chunk(delta, talk))
            yield response(id=id, usage=self._usage(generation.usage()))

    async def embed(self, body: Any, call: Any) -> Any:
        async with self._inside(call):
            await self.serving.use_model(body.model or None)
            inputs = list(body.inputs)
            if not 0 < len(inputs) <= MAX_INPUTS or not all(inputs):
                raise InputError(f"inputs takes 1 to {MAX_INPUTS} texts, none of them empty", param="inputs")
            vectors, tokens = await embed(self.serving, inputs, pooling=body.pooling or None)
            embedding, usage = self.messages["Embedding"], self.messages["Usage"](prompt_tokens=tokens)
            return self.messages["EmbedResponse"](embeddings=[embedding(values=v) for v in vectors], usage=usage)

    @asynccontextmanager
    async def _inside(self, call: Any) -> AsyncIterator[None]:
        """Behind the gate: key, place in the queue, request id; errors as gRPC states them."""
        import grpc

        context: Context | None = None
        try:
            context = self._let_in(call)
            enter(context)
            prepare_pool.enter(self.serving.prepare_pool)
            yield
        except Exception as error:  # what it says is decided by describe, not by grpc
            failure = describe(error)
            trailing = tuple((name.lower(), value) for name, value in failure.headers.items())
            code = grpc.StatusCode[CODES.get(failure.status, "INTERNAL")]
            await call.abort(code, failure.body.error.message, trailing)
        finally:
            if context is not None:
                context.release_model()
                if context.permit is not None:
                    self.serving.admission.leave(context.permit)

    def _let_in(self, call: Any) -> Context:
        from quire.serve.grpc.key_interceptor import headers_of, key_of

        headers = headers_of(call.invocation_metadata())
        key = key_of(self.serving.keys, call.invocation_metadata())
        return context_of(self.serving, key, request_id_of(headers), headers, works=True)

    async def _talk(self, body: Any, id: str, arrived: float, deadline_ms: int | None) -> Talk | None:
        """The answer to a chat; None for other inputs."""
        if body.WhichOneof("input") != "chat":
            return None
        turn = turn_of(body.chat, params_of(body.sampling))
        turn.priority, turn.salt, turn.deadline_ms = body.priority, body.cache_salt, deadline_ms
        turn.blend = blend_of(body)
        return await start(self.serving, turn, id, arrived)

    async def _generation(self, body: Any, id: str, arrived: float, deadline_ms: int | None) -> Generation:
        frontend, params, blend = self.serving.frontend, params_of(body.sampling), blend_of(body)
        kind = body.WhichOneof("input")
        if kind is None:
            raise InputError("give one of prompt, tokens and chat", param="input")

        def work() -> Request:
            prompt = body.prompt if kind == "prompt" else list(body.tokens.ids)
            how = {"blend": blend, "request_id": id, "priority": body.priority, "salt": body.cache_salt}
            return frontend.prepare(prompt, params, **how)

        with naming(constraint="sampling.grammar"):
            request = await off_loop(preparing(body.ByteSize(), params), work)
        return Generation(self.serving, [request], arrived, deadline_ms=deadline_ms)

    def _chunk(self, delta: Delta, talk: Talk | None) -> Any:
        token = self.messages["TokenLogprob"]
        logprobs = [
            self.messages["Logprobs"](
                drawn=token(token=entry.token, logprob=entry.logprob),
                top=[token(token=t, logprob=p) for t, p in zip(entry.top_ids, entry.top_logprobs, strict=True)],
            )
            for entry in delta.logprobs or ()
        ]
        chunk = self.messages["Chunk"](
            index=delta.branch,
            token_ids=delta.token_ids,
            logprobs=logprobs,
            finish_reason=delta.finish_reason.value if delta.finish_reason else "",
        )
        if talk is None:
            chunk.text = delta.text
            return chunk
        reply = talk.replies[delta.branch]
        for segment in reply.push(delta):
            if isinstance(segment, Said):
                chunk.text += segment.text
            elif isinstance(segment, Thought):
                chunk.reasoning += segment.text
            elif isinstance(segment, CallBegun):
                call = reply.calls[segment.index]
                chunk.calls.add(index=segment.index, id=call.id, name=call.name)
            else:
                chunk.calls.add(index=segment.index, arguments=segment.text)
        return chunk

    def _usage(self, used: Usage) -> Any:
        return self.messages["Usage"](
            prompt_tokens=used.prompt_tokens,
            completion_tokens=used.completion_tokens,
            cached_tokens=used.cached_tokens,
            blended_tokens=used.blended_tokens or 0,
        )


def _ttl(seconds: float) -> float | None:
    if not 0 <= seconds <= MAX_HOLD:
        raise InputError(f"session_ttl must be above 0 and at most {MAX_HOLD:.0f} seconds", param="session_ttl")
    return seconds or None


def _deadline(body: Any, call: Any) -> int | None:
    """The sooner of the body's own and the call's; None: the server's."""
    left = call.time_remaining()
    bounds = [body.deadline_ms] if body.deadline_ms else []
    with suppress(OverflowError):  # a call without a deadline has an infinite one
        if left is not None:
            bounds.append(max(1, int(left * 1000)))
    return min(bounds, default=None)
