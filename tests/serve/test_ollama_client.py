"""The `ollama` client, which nobody here wrote, against a live server: over the fake, then the real model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import httpx
import jsonschema
import msgspec
import numpy as np
import ollama
import pytest
from fake_frontend import FakeClient, FakeFrontend
from loopback_hub import Hub

from quire.assets import LocalModel
from quire.assets.local import at_path
from quire.assets.store import _record
from quire.serve.http.server import background_server
from quire.types.messages import WeightsInfo
from quire.types.serving import ServeOptions

MODEL = FakeFrontend.model_name
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture
def fake(fake_server: str) -> ollama.Client:
    return ollama.Client(host=fake_server)


@pytest.fixture
def live(live_server: str) -> ollama.Client:
    return ollama.Client(host=live_server, timeout=120)


def test_chat(fake: ollama.Client, says: Any, fake_frontend: FakeFrontend) -> None:
    says("Sunny.")
    options = {"temperature": 0.3, "num_predict": 40, "stop": ["x"], "seed": 7, "repeat_penalty": 1.2, "num_ctx": 2048}
    answer = fake.chat(model=MODEL, messages=QUESTION, options=options)
    assert answer.message.content == "Sunny." and answer.done and answer.done_reason == "stop"
    assert answer.eval_count == 7 and answer.prompt_eval_count == len(fake_frontend.requests[-1].prompt)
    assert (answer.total_duration or 0) >= (answer.eval_duration or 0) > 0
    params = fake_frontend.requests[-1].params
    assert (params.temperature, params.max_tokens, params.stop, params.seed) == (0.3, 40, ["x"], 7)
    assert (params.repetition_penalty, params.top_k, params.top_p) == (1.2, 40, 0.9)
    assert fake.chat(model=f"{MODEL}:latest", messages=QUESTION).message.content == "Sunny."


def test_older_names_and_nothing_to_embed(fake_server: str) -> None:
    http = httpx.Client(base_url=fake_server)
    assert http.post("/api/show", json={"name": MODEL}).json()["details"]
    assert http.post("/api/show", json={}).status_code == 400
    for nothing in ({}, {"input": ""}, {"input": []}, {"input": None}):
        assert http.post("/api/embed", json={"model": MODEL, **nothing}).json()["embeddings"] == []
    assert http.post("/api/embed", json={"model": MODEL, "input": ["x", ""]}).status_code == 400
    for nothing in ({}, {"prompt": ""}):
        assert http.post("/api/embeddings", json={"model": MODEL, **nothing}).json() == {"embedding": []}
    for path in ("/api/tags", "/api/version"):
        assert http.head(path).status_code == 200


def test_chat_streams_lines(fake: ollama.Client, fake_server: str, says: Any) -> None:
    says("<think>Hm.</think>Sunny.", reasons=True)
    parts = list(fake.chat(model=MODEL, messages=QUESTION, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "Sunny."
    assert "".join(part.message.thinking or "" for part in parts) == "Hm."
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    silent = fake.chat(model=MODEL, messages=QUESTION, think=False)
    assert silent.message.thinking is None
    response = httpx.post(f"{fake_server}/api/chat", json={"model": MODEL, "messages": QUESTION})
    assert response.headers["content-type"] == "application/x-ndjson"
    assert all(json.loads(line) for line in response.text.splitlines())


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
      city: where

    Returns:
      the weather
    """
    return f"sunny in {city}"


def test_tools(fake: ollama.Client, says: Any, fake_frontend: FakeFrontend) -> None:
    says('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>')
    for streaming in (False, True):
        found = fake.chat(model=MODEL, messages=QUESTION, tools=[get_weather], stream=streaming)  # type: ignore[call-overload]
        parts = list(found) if streaming else [found]
        [call] = [call for part in parts for call in part.message.tool_calls or ()]
        assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    says("Sunny.")
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather(**call.function.arguments)}
    call_message = {"role": "assistant", "tool_calls": [call.model_dump()]}
    answer = fake.chat(model=MODEL, messages=[*QUESTION, call_message, result], tools=[get_weather])
    assert answer.message.content == "Sunny."
    assert [message["role"] for message in fake_frontend.text.rendered[-1]["messages"]] == ["user", "assistant", "tool"]


def test_generate(fake: ollama.Client, says: Any, fake_frontend: FakeFrontend) -> None:
    says("Sunny.")
    answer = fake.generate(model=MODEL, prompt="Weather?", system="Be brief.", format="json")
    assert answer.response == "Sunny." and answer.done
    assert [message["role"] for message in fake_frontend.text.rendered[-1]["messages"]] == ["system", "user"]
    grammar = fake_frontend.requests[-1].params.grammar
    assert grammar is not None and grammar.kind == "json_object"
    fake.generate(model=MODEL, prompt="Weather?", raw=True)
    assert bytes(fake_frontend.requests[-1].prompt) == b"Weather?"
    assert "".join(part.response for part in fake.generate(model=MODEL, prompt="x", stream=True)) == "Sunny."
    loaded = fake.generate(model=MODEL)
    assert (loaded.done_reason, loaded.response) == ("load", "")
    scored = fake.generate(model=MODEL, prompt="x", logprobs=True, top_logprobs=2)
    assert scored.logprobs is not None and len(scored.logprobs[0].top_logprobs or []) == 2


def test_models(fake: ollama.Client, fake_server: str) -> None:
    [listed] = fake.list().models
    assert listed.model == MODEL
    shown = fake.show(MODEL)
    assert "tools" in (shown.capabilities or []) and shown.template
    assert fake.ps().models[0].model == MODEL
    assert httpx.get(f"{fake_server}/api/version").json()["version"]


def test_embed(fake: ollama.Client) -> None:
    one = fake.embed(model=MODEL, input="a")
    two = fake.embed(model=MODEL, input=["a", "b" * 600])  # longer than the context: cut, unless told otherwise
    assert two.embeddings[0] == one.embeddings[0] and len(two.embeddings) == 2
    assert fake.embeddings(model=MODEL, prompt="a").embedding == one.embeddings[0]
    with pytest.raises(ollama.ResponseError, match="context"):
        fake.embed(model=MODEL, input="b" * 600, truncate=False)
    with pytest.raises(ollama.ResponseError, match="at most 2048"):
        fake.embed(model=MODEL, input=["a"] * 2049)
    with pytest.raises(ollama.ResponseError, match="empty"):
        fake.embed(model=MODEL, input=["a", ""])
    many = fake.embed(model=MODEL, input=[f"{i % 7}" for i in range(200)]).embeddings
    assert many == [many[i % 7] for i in range(200)]


ERRORS: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "other"}, 404, "not found"),
    ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "only parts of text"),
    ({"options": {"temperatur": 1}}, 400, "temperatur"),
    ({"options": {"num_predict": "x"}}, 400, "num_predict"),
    ({"messages": [{"role": "user", "content": "overloaded"}]}, 503, "full"),
    ({"messages": [{"role": "user", "content": "boom"}]}, 500, "error id"),
]


@pytest.mark.parametrize(("change", "status", "word"), ERRORS)
def test_errors_have_ollamas_shape(
    fake: ollama.Client, fake_server: str, change: dict[str, Any], status: int, word: str
) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        fake.chat(**{"model": MODEL, "messages": QUESTION, **change})
    assert caught.value.status_code == status and word in caught.value.error and "secret" not in caught.value.error
    response = httpx.post(
        f"{fake_server}/api/chat", json={"model": MODEL, "messages": QUESTION, "stream": False, **change}
    )
    assert set(response.json()) == {"error"} and isinstance(response.json()["error"], str)


def test_a_stream_that_fails_says_so(fake: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="internal error"):
        list(fake.chat(model=MODEL, messages=[{"role": "user", "content": "late-boom"}], stream=True))


def test_every_option_is_taken(fake: ollama.Client, fake_server: str, fake_frontend: FakeFrontend) -> None:
    fields = ollama._types.Options.model_fields  # type: ignore[attr-defined]
    values: dict[str, Any] = dict.fromkeys(fields, 1) | {"stop": ["x"]}
    values |= {name: True for name, field in fields.items() if field.annotation == bool | None}
    fake.chat(model=MODEL, messages=QUESTION, options=values)
    gone = {"mirostat": 2, "mirostat_tau": 5.0, "tfs_z": 2, "penalize_newline": False, "num_ctx": 4096.0}
    body = {"model": MODEL, "messages": QUESTION, "stream": False, "options": gone}
    answer = httpx.post(f"{fake_server}/api/chat", json=body)
    assert answer.status_code == 200 and "x-quire-ignored-fields" not in answer.headers
    body["options"] = {"repeat_last_n": 64, "typical_p": 0.7}
    answer = httpx.post(f"{fake_server}/api/chat", json=body)
    assert answer.headers["x-quire-ignored-fields"] == "repeat_last_n, typical_p"


def test_options_out_of_range_are_the_nearest(fake: ollama.Client, fake_frontend: FakeFrontend) -> None:
    wild: Any = {
        "seed": -1, "num_predict": -7, "temperature": -1, "top_k": -1, "top_p": 0, "min_p": 7, "repeat_penalty": 0,
        "presence_penalty": 9, "frequency_penalty": -9,
    }  # fmt: skip
    fake.chat(model=MODEL, messages=QUESTION, options=wild)
    params = fake_frontend.requests[-1].params
    assert (params.seed, params.max_tokens, params.temperature, params.top_k, params.min_p) == (None, None, 0, 0, 1)
    assert 0 < params.top_p < 1e-3 and params.repetition_penalty > 0
    assert (params.presence_penalty, params.frequency_penalty) == (2, -2)
    fake.chat(model=MODEL, messages=QUESTION, options={"num_predict": 3.0, "seed": 7.0, "top_k": 5.0})  # type: ignore[arg-type]
    params = fake_frontend.requests[-1].params
    assert (params.max_tokens, params.seed, params.top_k) == (3, 7, 5)


def test_loading_and_letting_go(fake: ollama.Client) -> None:
    assert fake.chat(model=MODEL, messages=[]).done_reason == "load"
    for zero in (0, "0s"):
        assert fake.generate(model=MODEL, keep_alive=zero).done_reason == "load"  # the only model stays


def test_model_files_are_left_alone(fake: ollama.Client) -> None:
    for act in (lambda: fake.pull("org/x"), lambda: fake.copy(MODEL, "y"), lambda: fake.delete("y")):
        with pytest.raises(ollama.ResponseError, match="--model-management") as caught:
            act()
        assert caught.value.status_code == 403
    with pytest.raises(ollama.ResponseError, match="neither made nor published"):
        fake.create("y", from_=MODEL)
    with pytest.raises(ollama.ResponseError, match="neither made nor published"):
        fake.push("y")


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", np.zeros((3, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_model_management(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_gguf: bytes) -> None:
    """The served model lies in a cache of its own; another is fetched (by a stand-in), copied and deleted."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    served, other = tmp_path / "hub" / "served.gguf", tmp_path / "hub" / "other.gguf"
    for path in (served, other):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(tiny_gguf)
        _record(f"org/{path.name}", path)
    fetched = replace(at_path(other), name="org/other.gguf")

    def pull(name: str, progress: Any) -> LocalModel:
        assert name == "org/new:q.gguf"
        for done in (1, 2):
            progress("q.gguf", done, 2)
        return fetched

    monkeypatch.setattr("quire.assets.pull", pull)
    frontend = FakeFrontend()
    weights = WeightsInfo(path=str(served), kind="gguf", bytes=len(tiny_gguf), architecture="llama", parameters=12)
    frontend.client.info = msgspec.structs.replace(FakeClient.info, model="org/served.gguf", weights=weights)
    options = ServeOptions(port=0, grace=1, model_management=True)
    with background_server(lambda: frontend, options) as url:  # type: ignore[arg-type, return-value]
        client = ollama.Client(host=url)
        steps = list(client.pull("org/new:q.gguf", stream=True))
        digest = hashlib.sha256(tiny_gguf).hexdigest()
        assert [step.status for step in steps] == [
            "pulling manifest", "pulling q.gguf", "pulling q.gguf", "verifying sha256 digest", f"pulling {digest[:12]}",
            "success",
        ]  # fmt: skip
        assert [(step.completed, step.total) for step in steps[1:3]] == [(1, 2), (2, 2)]
        assert steps[-2].digest == f"sha256:{digest}" and client.pull("org/new:q.gguf").status == "success"
        for wrong in ("../x", "/etc/passwd", "nothing"):
            with pytest.raises(ollama.ResponseError, match="no model"):
                client.pull(wrong)
        client.copy(MODEL, "mine")
        names = {model.model: model for model in client.list().models}
        assert set(names) == {MODEL, "mine", "org/other.gguf", "org/served.gguf"}
        assert names["mine"].digest == digest and names["mine"].size == len(tiny_gguf)
        assert client.chat(model="mine", messages=QUESTION, options={"num_predict": 2}).eval_count == 2
        with pytest.raises(ollama.ResponseError, match="not found"):
            client.chat(model="org/other.gguf", messages=QUESTION)
        client.delete("org/other.gguf")
        with pytest.raises(ollama.ResponseError, match="being served"):
            client.delete("org/served.gguf")
        assert "org/other.gguf" not in [model.model for model in client.list().models]


def test_pulling_tells_how_far_it_is(hub: Hub, tiny_gguf: bytes) -> None:
    """From a hub, through the library itself: sizes as it goes, nothing fetched twice, the cause where it fails."""
    hub.files["org/new"] = {"tiny-Q4_K_M.gguf": tiny_gguf + bytes(100_000), "config.json": b"{}"}
    hub.files["org/closed"], hub.gated = {"a.gguf": tiny_gguf}, {"org/closed"}
    options = ServeOptions(port=0, grace=1, model_management=True)
    with background_server(FakeFrontend, options) as url:  # type: ignore[arg-type, return-value]
        client = ollama.Client(host=url)
        steps = list(client.pull("org/new:tiny-Q4_K_M.gguf", stream=True))
        told = [(step.completed, step.total) for step in steps if step.status == "pulling tiny-Q4_K_M.gguf"]
        size = len(hub.files["org/new"]["tiny-Q4_K_M.gguf"])
        assert len(told) > 2 and told == sorted(told) and told[-1] == (size, size)
        assert steps[-1].status == "success" and any(model.size == size for model in client.list().models)
        fetched = hub.sent
        assert client.pull("org/new:tiny-Q4_K_M.gguf").status == "success" and hub.sent == fetched
        for wrong, why in (("org/closed", "gated"), ("org/missing", "has no model")):
            with pytest.raises(ollama.ResponseError, match=why):
                client.pull(wrong)


# ---- the real model -----------------------------------------------------------------------------------------


def test_live_facts(live: ollama.Client, default_model: LocalModel) -> None:
    [listed] = live.list().models
    assert listed.details is not None and listed.model is not None
    assert listed.size == default_model.path.stat().st_size
    assert listed.digest == hashlib.sha256(default_model.path.read_bytes()).hexdigest()
    about = listed.details
    assert (about.format, about.family, about.parameter_size, about.quantization_level) == (
        "gguf", "llama", "134.52M", "Q4_1",
    )  # fmt: skip
    [loaded] = live.ps().models
    assert (loaded.digest, loaded.size, loaded.context_length) == (listed.digest, listed.size, 8192)
    shown = live.show(listed.model)
    assert shown.modelinfo is not None and shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["general.parameter_count"] == 134515008 and shown.modelinfo["llama.context_length"] == 8192


def test_live(live: ollama.Client) -> None:
    model = str(live.list().models[0].model)
    options = {"temperature": 0, "num_predict": 12}
    whole = live.chat(model=model, messages=QUESTION, options=options)
    text = "".join(
        p.message.content or "" for p in live.chat(model=model, messages=QUESTION, options=options, stream=True)
    )
    assert text == whole.message.content != "" and whole.done_reason == "length" and whole.eval_count == 12
    bound = live.generate(model=model, prompt="A city?", format=SCHEMA, options={"temperature": 0, "num_predict": 60})
    jsonschema.validate(json.loads(bound.response or ""), SCHEMA)
    assert len(live.embed(model=model, input=["a", "b"]).embeddings) == 2
