"""gRPC, through a client that protoc generates here and now: stream, cancel, health, auth, errors."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
from fake_frontend import FakeFrontend
from grpc_health.v1 import health_pb2, health_pb2_grpc

import quire.serve.grpc.proto
from quire.serve.core.api_keys import ADMIN, INFERENCE, Key, KeyRing, digest
from quire.serve.http.server import ServerUrl, background_server
from quire.types.errors import ConfigError
from quire.types.serving import ServeOptions

PROTO = Path(quire.serve.grpc.proto.__file__).parent
USER, OPERATOR = "user-secret-0123456789", "admin-secret-0123456789"
KEYS = KeyRing([Key("user", digest(USER), frozenset({INFERENCE})), Key("op", digest(OPERATOR), frozenset({ADMIN}))])
OPTIONS = ServeOptions(port=0, grace=1, grpc_port=0)


def protoc(*words: str) -> None:
    """In a process of its own: where its library is loaded, importing nixl's aborts."""
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *words], check=True)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModuleType, ModuleType]:
    """The client's code, from the proto file that ships."""
    folder = tmp_path_factory.mktemp("client")
    (folder / "made_client.proto").write_text((PROTO / "quire.proto").read_text())
    out = [f"--python_out={folder}", f"--grpc_python_out={folder}"]
    protoc(f"-I{folder}", *out, "made_client.proto")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("made_client_pb2"), importlib.import_module("made_client_pb2_grpc")
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def frontend() -> FakeFrontend:
    return FakeFrontend()


@pytest.fixture(scope="module")
def server(frontend: FakeFrontend) -> Iterator[ServerUrl]:
    with background_server(lambda: frontend, OPTIONS) as url:  # type: ignore[arg-type, return-value]
        yield url


@pytest.fixture
def stub(server: ServerUrl, generated: tuple[ModuleType, ModuleType]) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield generated[1].QuireStub(channel)


def test_shipped_descriptors_are_those_of_the_proto(tmp_path: Path) -> None:
    root = PROTO.parents[3]
    out = tmp_path / "quire.binpb"
    path = (PROTO / "quire.proto").relative_to(root)
    protoc(f"-I{root}", f"--descriptor_set_out={out}", str(path))
    assert out.read_bytes() == (PROTO / "quire.binpb").read_bytes()


def test_stream(stub: Any, generated: tuple[ModuleType, ModuleType]) -> None:
    messages, _ = generated
    sampling = messages.Sampling(n=2, temperature=0, max_tokens=500, logprobs=2)
    chat = messages.Chat(messages=[messages.Message(role="user", content="hello")])
    *events, last = stub.Generate(messages.GenerateRequest(chat=chat, sampling=sampling))
    texts = ["", ""]
    for event in events:
        texts[event.chunk.index] += event.chunk.text
        assert len(event.chunk.logprobs) == len(event.chunk.token_ids)
        assert all(len(entry.top) == 2 for entry in event.chunk.logprobs)
    assert texts == ["€greedy für uns: one two three four five six seven eight nine ten"] * 2
    assert [event.chunk.finish_reason for event in events if event.chunk.finish_reason] == ["stop", "stop"]
    assert last.usage.completion_tokens == sum(len(event.chunk.token_ids) for event in events)
    assert last.usage.prompt_tokens > 0
    assert len({event.id for event in (*events, last)}) == 1


def test_what_is_asked_is_what_the_sampler_gets(
    stub: Any, frontend: FakeFrontend, generated: tuple[ModuleType, ModuleType]
) -> None:
    messages, _ = generated
    sampling = messages.Sampling(temperature=0.5, seed=7, stop=["three"], stop_token_ids=[9], ignore_eos=True)
    tokens = messages.Tokens(ids=[72, 105])
    list(stub.Generate(messages.GenerateRequest(tokens=tokens, sampling=sampling, priority=-3, deadline_ms=60_000)))
    request = frontend.requests[-1]
    assert (request.prompt, request.priority) == ([72, 105], -3)
    assert request.params.seed == 7 and request.params.stop == ["three"] and request.params.stop_token_ids == [9]
    assert request.params.ignore_eos and request.params.temperature == 0.5
    assert request.deadline > 0


@pytest.mark.parametrize("kind", ["prompt", "chat"])
def test_chunks_to_reuse_at_other_places(
    stub: Any, frontend: FakeFrontend, generated: tuple[ModuleType, ModuleType], kind: str
) -> None:
    messages, _ = generated
    text = "Read.|one document|another one|What do they say?"
    chat = messages.Chat(messages=[messages.Message(role="user", content=text)])
    given = {"prompt": text} if kind == "prompt" else {"chat": chat}
    asked = messages.GenerateRequest(blend=messages.Blend(separator="|", recompute=0.5), **given)
    *_, last = stub.Generate(asked)
    request = frontend.requests[-1]
    assert request.blend is not None and request.blend.recompute == 0.5
    assert len(request.blend.chunks) == 2 and last.usage.blended_tokens == 0
    with pytest.raises(grpc.RpcError) as failure:
        list(stub.Generate(messages.GenerateRequest(blend=messages.Blend(), **given)))
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_chunks_of_token_ids(stub: Any, frontend: FakeFrontend, generated: tuple[ModuleType, ModuleType]) -> None:
    messages, _ = generated
    blend = messages.Blend(chunks=[messages.Span(start=1, end=3), messages.Span(start=3, end=5)], max_error=0.25)
    list(stub.Generate(messages.GenerateRequest(tokens=messages.Tokens(ids=range(60, 66)), blend=blend)))
    found = frontend.requests[-1].blend
    assert found is not None and found.chunks == [(1, 3), (3, 5)]
    assert (found.recompute, found.max_error) == (1.0, 0.25), "as much as the error takes"
    list(stub.Generate(messages.GenerateRequest(tokens=messages.Tokens(ids=range(60, 66)), blend=messages.Blend())))
    found = frontend.requests[-1].blend
    assert found is not None and found.chunks == []  # nothing was retrieved


def test_cancel_stops_the_work(stub: Any, frontend: FakeFrontend, generated: tuple[ModuleType, ModuleType]) -> None:
    messages, _ = generated
    call = stub.Generate(messages.GenerateRequest(prompt="hang"))
    assert next(iter(call)).chunk.token_ids
    assert frontend.hanging.acquire(timeout=20)
    call.cancel()
    assert frontend.aborted.acquire(timeout=20)
    assert call.code() is grpc.StatusCode.CANCELLED


def test_embed(stub: Any, generated: tuple[ModuleType, ModuleType]) -> None:
    messages, _ = generated
    answer = stub.Embed(messages.EmbedRequest(inputs=["a", "bc"], pooling="last"))
    assert len(answer.embeddings) == 2 and answer.usage.prompt_tokens == 3
    assert sum(value * value for value in answer.embeddings[0].values) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ({}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"prompt": "hi", "model": "other"}, grpc.StatusCode.NOT_FOUND),
        ({"prompt": "x" * 600}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"prompt": "overloaded"}, grpc.StatusCode.UNAVAILABLE),
        ({"prompt": "dead"}, grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_errors(
    stub: Any, generated: tuple[ModuleType, ModuleType], request_: dict[str, str], code: grpc.StatusCode
) -> None:
    messages, _ = generated
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(messages.GenerateRequest(**request_)))
    assert caught.value.code() is code and caught.value.details()
    if request_.get("prompt") == "overloaded":
        assert dict(caught.value.trailing_metadata())["retry-after"] == "3"


def test_internal_errors_say_nothing(stub: Any, generated: tuple[ModuleType, ModuleType]) -> None:
    messages, _ = generated
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(messages.GenerateRequest(prompt="boom")))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret detail" not in caught.value.details() and "error id" in caught.value.details()


def test_health_follows_the_engine(server: ServerUrl, frontend: FakeFrontend) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="quire.v1.Quire"))
        states = (state.status for state in watch)
        serving, gone = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert next(state for state in states if state == serving) == serving
        frontend.client.alive = False
        try:
            assert next(states) == gone
        finally:
            frontend.client.alive = True
        assert next(states) == serving
        watch.cancel()


def test_keys_open_it_and_nothing_else_does(generated: tuple[ModuleType, ModuleType]) -> None:
    messages, service = generated
    frontend = FakeFrontend()
    with (
        background_server(lambda: frontend, OPTIONS, keys=KEYS) as url,  # type: ignore[arg-type, return-value]
        grpc.insecure_channel(f"127.0.0.1:{url.grpc_port}") as channel,
    ):
        stub = service.QuireStub(channel)
        request = messages.GenerateRequest(prompt="hi")

        def code(*metadata: tuple[str, str]) -> grpc.StatusCode:
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(request, metadata=metadata))
            with pytest.raises(grpc.RpcError) as embedding:
                stub.Embed(messages.EmbedRequest(inputs=["a"]), metadata=metadata)
            assert caught.value.code() is embedding.value.code()
            return caught.value.code()

        assert code() is grpc.StatusCode.UNAUTHENTICATED
        assert code(("authorization", "Bearer wrong-secret-012345")) is grpc.StatusCode.UNAUTHENTICATED
        assert code(("authorization", f"Bearer {OPERATOR}")) is grpc.StatusCode.PERMISSION_DENIED
        assert not frontend.requests
        assert list(stub.Generate(request, metadata=(("authorization", f"Bearer {USER}"),)))
        assert frontend.requests[-1].salt  # the key's own
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_session_is_named_and_timed(
    stub: Any, frontend: FakeFrontend, generated: tuple[ModuleType, ModuleType]
) -> None:
    messages, _ = generated
    sampling = messages.Sampling(max_tokens=2)
    for ttl, held in ((0.0, 300.0), (12.5, 12.5)):
        ask = messages.GenerateRequest(prompt="hello", sampling=sampling, session_id="agent", session_ttl=ttl)
        list(stub.Generate(ask))
        assert (frontend.requests[-1].session, frontend.requests[-1].hold) == ("agent", held)
    with pytest.raises(grpc.RpcError, match="session_ttl"):
        list(stub.Generate(messages.GenerateRequest(prompt="x", sampling=sampling, session_id="a", session_ttl=1e6)))


# ---- grammars, tools, biases, TLS ---------------------------------------------------------------------------


def test_grammars_and_biases_reach_the_sampler(
    stub: Any, frontend: FakeFrontend, generated: tuple[ModuleType, ModuleType]
) -> None:
    messages, _ = generated

    def asked(**sampling: Any) -> Any:
        list(stub.Generate(messages.GenerateRequest(prompt="x", sampling=messages.Sampling(max_tokens=2, **sampling))))
        return frontend.requests[-1].params

    grammars = {
        "json_schema": ('{"type": "object"}', '{"type": "object"}'),
        "regex": ("[a-z]+", "[a-z]+"),
        "lark": ('start: "a"', 'start: "a"'),
        "choice": (messages.Choices(options=["a", "b"]), '["a","b"]'),
        "json_object": (True, ""),
    }
    for kind, (given, source) in grammars.items():
        found = asked(grammar=messages.Grammar(**{kind: given})).grammar
        assert (found.kind, found.source) == (kind, source)
    params = asked(logit_bias={65: -100.0, 66: 2.5}, bad_words=["no"])
    assert (params.logit_bias, params.bad_words) == ({65: -100.0, 66: 2.5}, ["no"])
    for wrong in ({"logit_bias": {65: 101.0}}, {"logit_bias": {9999: 1.0}}, {"grammar": messages.Grammar()}):
        with pytest.raises(grpc.RpcError) as caught:
            asked(**wrong)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def test_tools(stub: Any, frontend: FakeFrontend, generated: tuple[ModuleType, ModuleType]) -> None:
    messages, _ = generated
    tool = messages.Tool(name="get_weather", description="The weather.", parameters=json.dumps(SCHEMA))
    user = messages.Message(role="user", content="Weather?")
    sampling = messages.Sampling(max_tokens=300)

    def answer(*turns: Any, **choice: Any) -> tuple[str, str, list[Any]]:
        chat = messages.Chat(messages=turns, tools=[tool], tool_choice=messages.ToolChoice(**choice))
        text, thought, calls = "", "", []
        for event in stub.Generate(messages.GenerateRequest(chat=chat, sampling=sampling)):
            text += event.chunk.text
            thought += event.chunk.reasoning
            for call in event.chunk.calls:
                if call.name:
                    calls.append(messages.ToolCall(id=call.id, name=call.name))
                calls[call.index].arguments += call.arguments
        return text, thought, calls

    call = {"name": "get_weather", "arguments": {"city": "Paris"}}
    frontend.says, frontend.text.reasons = f"<think>Hm.</think>Look. <tool_call>{json.dumps(call)}</tool_call>", True
    try:
        text, thought, calls = answer(user)
        assert (text.strip(), thought) == ("Look.", "Hm.")
        assert [(c.name, json.loads(c.arguments)) for c in calls] == [("get_weather", {"city": "Paris"})]
        assert frontend.text.rendered[-1]["tools"][0]["function"]["parameters"] == SCHEMA
        frontend.says, frontend.text.reasons = "Sunny.", False
        said = messages.Message(role="assistant", tool_calls=calls, reasoning=thought)
        result = messages.Message(role="tool", content="sun", tool_call_id=calls[0].id)
        assert answer(user, said, result)[0] == "Sunny."
        sent = frontend.text.rendered[-1]["messages"]
        assert sent[1]["tool_calls"][0]["function"] == call and sent[1]["reasoning_content"] == "Hm."
        assert sent[2] == {"role": "tool", "content": "sun", "tool_call_id": calls[0].id}
        frontend.says = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"  # the grammar has the model's format
        modes = messages.ToolChoice.Mode
        _, _, forced = answer(user, mode=modes.REQUIRED, only=["get_weather"], single=True)
        assert forced[0].name == "get_weather" and frontend.requests[-1].params.grammar is not None
        answer(user, mode=modes.NONE)
        assert not frontend.text.rendered[-1]["tools"]
    finally:
        frontend.says, frontend.text.reasons = None, False
    with pytest.raises(grpc.RpcError, match="not among the tools"):
        answer(user, mode=modes.REQUIRED, only=["other"])
    tool.parameters = "[1]"
    with pytest.raises(grpc.RpcError, match="tools"):
        answer(user)
    with pytest.raises(grpc.RpcError, match="messages"):
        answer()


def test_tls(generated: tuple[ModuleType, ModuleType], certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    options = ServeOptions(port=0, grace=1, grpc_port=0, grpc_cert=str(cert), grpc_key=str(key))
    messages, service = generated
    request = messages.GenerateRequest(prompt="hi", sampling=messages.Sampling(max_tokens=2))
    with background_server(FakeFrontend, options) as url:  # type: ignore[arg-type]
        trusted = grpc.ssl_channel_credentials(cert.read_bytes())
        with grpc.secure_channel(f"localhost:{url.grpc_port}", trusted) as channel:
            assert list(service.QuireStub(channel).Generate(request))
        with grpc.insecure_channel(f"127.0.0.1:{url.grpc_port}") as channel, pytest.raises(grpc.RpcError):
            list(service.QuireStub(channel).Generate(request, timeout=5))
        strange = grpc.ssl_channel_credentials()  # nobody vouches for the certificate
        with grpc.secure_channel(f"localhost:{url.grpc_port}", strange) as channel, pytest.raises(grpc.RpcError):
            list(service.QuireStub(channel).Generate(request, timeout=5))


def test_tls_options_are_checked(tmp_path: Path) -> None:
    alone: dict[str, Any] = {"grpc_cert": "c", "grpc_port": 0}
    for wrong, word in ((alone, "each other"), ({"grpc_cert": "c", "grpc_key": "k"}, "without grpc_port")):
        with pytest.raises(ConfigError, match=word):
            ServeOptions(**wrong)  # type: ignore[arg-type]
    missing = ServeOptions(port=0, grpc_port=0, grpc_cert=str(tmp_path / "c"), grpc_key=str(tmp_path / "k"))
    with pytest.raises(ConfigError, match="certificate"), background_server(FakeFrontend, missing):  # type: ignore[arg-type]
        pass


def test_live_grammar_and_bias(default_model: Any, generated: tuple[ModuleType, ModuleType]) -> None:
    """Over the real model, in a server of its own that shares nothing but the weights' file."""
    from quire.engine.client import AsyncClient
    from quire.engine.frontend import Frontend
    from quire.text import TextModel
    from quire.types.config import EngineOptions

    async def frontend() -> Any:
        client = await AsyncClient.open(EngineOptions.of(kv_memory="64M"), process=False)
        return Frontend(client, TextModel.load(default_model), default_model.name)

    messages, service = generated
    bound = messages.Sampling(max_tokens=40, temperature=0, grammar=messages.Grammar(regex="[0-9]{2} cats"))
    with (
        background_server(frontend, OPTIONS) as url,
        grpc.insecure_channel(f"127.0.0.1:{url.grpc_port}") as channel,
    ):
        stub = service.QuireStub(channel)
        text = "".join(e.chunk.text for e in stub.Generate(messages.GenerateRequest(prompt="I have", sampling=bound)))
        assert text[:2].isdigit() and text[2:] == " cats"
        biased = messages.Sampling(max_tokens=3, temperature=0, logit_bias={65: 100.0})
        found = stub.Generate(messages.GenerateRequest(prompt="I have", sampling=biased))
        assert [token for event in found for token in event.chunk.token_ids] == [65, 65, 65]
