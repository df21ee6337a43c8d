"""One server, several models: every API answers by the model that is named, which is loaded for it and held no longer
than its answer takes."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import ollama
import pytest
import thinking_model
from fake_frontend import FakeFrontend
from fake_models import Fakes, until
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.cli.main import app
from quire.engine.client import RestartPolicy
from quire.engine.model_pool import ModelPool
from quire.engine.open_pool import open_model_pool
from quire.serve.http.server import ServerUrl, background_server
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError
from quire.types.models_file import ServedModel, parse_keep_alive, read_models_file
from quire.types.serving import ServeOptions

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


@pytest.fixture
def url(fakes: Fakes, default_model: object) -> Iterator[ServerUrl]:
    with background_server(fakes.start) as found:  # type: ignore[arg-type]
        yield found
    assert all(frontend.client.closed.is_set() for frontend in fakes.frontends.values())


def chat(url: str, model: str | None, **more: object) -> httpx.Response:
    body = {"messages": HELLO, **({"model": model} if model else {}), **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def test_each_request_is_answered_by_the_model_it_names(url: str, fakes: Fakes) -> None:
    for model in ("a", "b", "org/c", "b", None):
        answer, name = chat(url, model).json(), model or "a"
        assert (answer["model"], answer["choices"][0]["message"]["content"]) == (name, f"I am {name}.")
    assert fakes.opened == ["a", "b", "org/c", "b", "a"]
    long = chat(url, "b", messages=[{"role": "user", "content": "x" * 5000}])  # prepared in a thread
    assert "512" in long.json()["error"]["message"]
    assert any(thread.startswith("quire-work") for thread in fakes.frontends["b"].text.threads)
    streamed = chat(url, "org/c", stream=True).text
    lines = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert {line["model"] for line in lines} == {"org/c"}
    assert "".join(line["choices"][0]["delta"].get("content") or "" for line in lines) == "I am org/c."
    until(fakes.idle)


def test_all_apis_choose_models(url: str, fakes: Fakes) -> None:
    def post(path: str, **body: object) -> dict:
        found = httpx.post(url + path, json=body, timeout=60)
        assert found.status_code == 200, found.text
        return found.json()

    assert post("/v1/completions", model="b", prompt="x")["choices"][0]["text"] == "I am b."
    assert post("/v1/messages", model="a", max_tokens=64, messages=HELLO)["content"][0]["text"] == "I am a."
    assert post("/v1/responses", model="b", input="x")["output"][0]["content"][0]["text"] == "I am b."
    assert post("/v1/embeddings", model="a", input="x")["model"] == "a"
    assert post("/api/chat", model="b", messages=HELLO, stream=False)["message"]["content"] == "I am b."
    assert post("/score", model="org/c", text_1="x", text_2="y")["model"] == "org/c"
    made = post("/v1/responses", model="b", input="x", background=True)
    until(lambda: httpx.get(f"{url}/v1/responses/{made['id']}").json()["status"] == "completed")
    found = httpx.get(f"{url}/v1/responses/{made['id']}").json()
    assert found["model"] == "b" and found["output"][0]["content"][0]["text"] == "I am b."
    until(fakes.idle)
    opened = len(fakes.opened)
    assert post("/tokenize", model="a", prompt="xyz")["count"] == 3  # a was loaded once: its tokenizer is known
    assert post("/v1/messages/count_tokens", model="org/c", messages=HELLO)["input_tokens"]
    assert len(fakes.opened) == opened


def test_a_batch_may_ask_several_models(url: str, fakes: Fakes) -> None:
    lines = [
        {"custom_id": f"{at}", "method": "POST", "url": "/v1/chat/completions", "body": {"model": m, "messages": HELLO}}
        for at, m in enumerate(["a", "b", "a", "org/c", "b"])
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = httpx.post(f"{url}/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = httpx.post(f"{url}/v1/batches", json=body).json()
    until(lambda: httpx.get(f"{url}/v1/batches/{batch['id']}").json()["status"] == "completed")
    done = httpx.get(f"{url}/v1/batches/{batch['id']}").json()
    answers = httpx.get(f"{url}/v1/files/{done['output_file_id']}/content").text.splitlines()
    said = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, answers)}
    assert [said[str(at)]["model"] for at in range(5)] == ["a", "b", "a", "org/c", "b"]
    until(fakes.idle)


def test_models_are_listed_with_their_state(url: str) -> None:
    chat(url, "b")
    cards = {card["id"]: card for card in httpx.get(f"{url}/v1/models").json()["data"]}
    assert [card["id"] for card in cards.values() if card["loaded"]] == ["b", "poet"] and len(cards) == 4
    assert len({card["permission"][0]["id"] for card in cards.values() if card["id"] != "poet"}) == 3
    assert cards["poet"]["parent"] == "b" and cards["org/c"]["max_model_len"] > 0
    assert httpx.get(f"{url}/v1/models/org/c").json()["loaded"] is False  # looking does not load
    unknown = chat(url, "d")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"] == "no model 'd' here; this server has 'a', 'b', 'poet', 'org/c'"


def test_an_adapter_answers_for_its_model(url: str, fakes: Fakes) -> None:
    chat(url, "b")
    chat(url, "a")
    for name in ("poet", "b:poet"):
        answer = chat(url, name).json()
        assert answer["model"] == "poet" and answer["choices"][0]["message"]["content"] == "I am b."
        assert fakes.frontends["b"].requests[-1].lora == "poet"
    assert chat(url, "a:poet").status_code == 404


def test_a_broken_model_fails_alone(url: ServerUrl, fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.pooled_model.FIRST_LOAD_PAUSE_S", 60.0)
    fakes.broken.add("b")
    failed = chat(url, "b")
    assert failed.status_code == 503 and "'b' could not be loaded" in failed.json()["error"]["message"]
    assert chat(url, "a").json()["model"] == "a" and httpx.get(f"{url}/ready").status_code == 200
    fakes.broken.clear()
    again = chat(url, "b")  # what is wrong is not tried for every request
    assert again.status_code == 503 and 0 < int(again.headers["retry-after"]) <= 60 and fakes.opened.count("b") == 1
    assert httpx.post(f"{url.admin}/models/load", json={"model": "b"}, timeout=60).status_code == 200
    assert chat(url, "b").json()["model"] == "b"


def test_a_hung_up_stream_lets_its_model_go(url: str, fakes: Fakes) -> None:
    body = {"model": "a", "messages": [{"role": "user", "content": "hang"}], "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert not fakes.idle()
        waiting: list[dict] = []
        other = threading.Thread(target=lambda: waiting.append(chat(url, "b").json()))
        other.start()
        until(lambda: any(one.state == "loading" for one in fakes.pool.states()))  # type: ignore[union-attr]
        assert fakes.opened == ["a"]  # a is in use: it stays
    other.join()
    assert waiting[0]["model"] == "b" and fakes.opened == ["a", "b"]
    until(fakes.idle)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9}),
        ("/api/embed", {"input": "x"}),
    ],
)
def test_a_client_that_hangs_up_while_it_waits_for_room_lets_others_in(
    url: str, fakes: Fakes, caplog: pytest.LogCaptureFixture, path: str, body: dict
) -> None:
    caplog.set_level(logging.INFO, "quire.serve")

    def loading() -> bool:
        return any(one.state == "loading" for one in fakes.pool.states())  # type: ignore[union-attr]

    hang = {"model": "a", "messages": [{"role": "user", "content": "hang"}], "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=hang, timeout=60) as busy:
        lines = busy.iter_lines()
        next(lines)
        waiting = http.client.HTTPConnection(url.removeprefix("http://"))
        waiting.request("POST", path, json.dumps({"model": "b", **body}), {"content-type": "application/json"})
        until(loading)
        waiting.close()
        until(lambda: not loading())
        assert chat(url, "a").json()["choices"][0]["message"]["content"] == "I am a."
        [line] = [line for line in caplog.records if line.getMessage() == "request cancelled"]
        assert line.fields["model"] == "b"  # type: ignore[attr-defined]
    assert fakes.opened == ["a"]


def test_looking_at_a_model_does_not_load_it(fakes: Fakes, default_model: object) -> None:
    with background_server(fakes.start) as url:  # type: ignore[arg-type]

        def get(route: str) -> httpx.Response:
            return httpx.get(route, params={"model": "b"}, timeout=60)

        for route in ("/view", "/models", "/metrics", "/v1/replicas", "/v1/requests"):
            assert get(url.admin + route).status_code == 200
        looked = get(f"{url.admin}/v1/cache")
        assert looked.status_code == 400 and looked.json()["error"]["message"] == "model 'b' is not loaded"
        assert get(f"{url}/tokenizer_info").json()["vocab_size"] > 0 and get(f"{url}/v1/models/b").status_code == 200
        assert fakes.opened == ["a"]


def test_ollama_says_how_long_models_stay(url: str, fakes: Fakes) -> None:
    client = ollama.Client(host=url)

    def loaded() -> list[str | None]:
        return [model.model for model in client.ps().models]

    assert loaded() == ["a"] and client.ps().models[0].expires_at.year == 9999  # type: ignore[union-attr]
    assert [model.model for model in client.list().models] == ["a", "b", "org/c"]
    assert client.generate(model="b").done_reason == "load" and loaded() == ["b", "poet"]
    assert client.generate(model="b", keep_alive=0).done_reason == "unload"
    until(lambda: loaded() == [])
    assert httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/ready").status_code == 200
    assert client.generate(model="org/c", keep_alive=0).done_reason == "unload"
    assert "org/c" not in fakes.opened  # it was not loaded to be let go
    answer = client.chat(model="a:latest", messages=HELLO, keep_alive="1h30m")
    assert answer.message.content == "I am a." and answer.load_duration
    [model] = client.ps().models
    assert 5390 < model.expires_at.timestamp() - time.time() < 5410  # type: ignore[union-attr]
    assert client.chat(model="a", messages=HELLO, keep_alive=0).message.content == "I am a."
    until(lambda: loaded() == [])
    with pytest.raises(ollama.ResponseError, match="keep_alive must be"):
        client.chat(model="a", messages=HELLO, keep_alive="soon")
    assert client.show("org/c").template and "org/c" not in fakes.opened


def test_a_model_whose_files_are_gone_is_still_listed(tmp_path: Path, default_model: object) -> None:
    fakes = Fakes()

    async def start() -> ModelPool:
        models = [ServedModel("a", EngineOptions()), ServedModel("b", EngineOptions.of(model=str(tmp_path / "gone")))]
        pool = ModelPool(models, fakes.open_model)  # type: ignore[arg-type]
        await pool.start()
        return pool

    with background_server(start) as url:  # type: ignore[arg-type]
        assert [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]] == ["a", "b"]
        assert len(httpx.get(f"{url}/api/tags").json()["models"]) == 2
        assert httpx.post(f"{url}/api/show", json={"model": "b"}).status_code == 404


def test_metrics_tell_models_apart(url: str) -> None:
    for model in ("a", "b", "b"):
        chat(url, model)
    text = httpx.get(f"{url}/metrics").text
    for line in (
        'quire_request_prompt_tokens_count{engine="0",model_name="a"} 1.0',
        'vllm:request_prompt_tokens_count{engine="0",model_name="b"} 2.0',
        'quire_engine_up{engine="0",model_name="b"} 1.0',
        'vllm:num_requests_running{engine="0",model_name="b"} 3.0',
        'quire_model_loads_total{model_name="b"} 1.0',
        'quire_model_loaded{model_name="a"} 0.0',
        'quire_model_loaded{model_name="b"} 1.0',
        'quire_model_asleep{model_name="a"} 0.0',
    ):
        assert line in text
    for name in ("vllm:num_requests_running", "quire_engine_up"):  # there is no engine to ask, and none is missing
        assert f'{name}{{engine="0",model_name="a"}}' not in text
    assert text.count("# TYPE vllm:generation_tokens_total ") == 1
    assert text.count('process="api"') == 1
    [newest, *_] = httpx.get(f"{url}/v1/requests").json()["data"]
    assert newest["model"] == "b"
    view = httpx.get(f"{url}/view", params={"model": "b"}).json()
    assert view["model"] == "b" and view["ready"]
    assert [one["state"] for one in view["models"]] == ["unloaded", "loaded", "unloaded"]
    assert httpx.get(f"{url}/view").json()["engine"] is None  # of the default, which is not loaded


def test_operators_load_and_unload(fakes: Fakes, default_model: object) -> None:
    with background_server(fakes.start) as url:  # type: ignore[arg-type]

        def post(route: str, model: str) -> httpx.Response:
            return httpx.post(f"{url.admin}/models/{route}", json={"model": model}, timeout=60)

        assert post("load", "b").json() == {"success": True} and fakes.opened == ["a", "b"]
        assert post("unload", "b").status_code == 200
        until(lambda: [one["state"] for one in httpx.get(f"{url.admin}/models").json()["data"]] == ["unloaded"] * 3)
        assert post("load", "d").status_code == 404
        slept = httpx.post(f"{url.admin}/v1/engine/sleep", params={"model": "b"})
        assert slept.status_code == 400 and "not loaded" in slept.text
        assert httpx.get(f"{url.admin}/is_sleeping").json() == {"is_sleeping": False}
        assert httpx.post(f"{url}/models/load", json={"model": "a"}).status_code == 404  # users must not
        assert httpx.get(f"{url.admin}/v1/replicas").json()["data"] == []
        post("load", "a")
        assert [one["id"] for one in httpx.get(f"{url.admin}/v1/replicas").json()["data"]] == ["a"]
    with background_server(FakeFrontend) as url:  # type: ignore[arg-type]
        refused = httpx.post(f"{url.admin}/models/unload", json={"model": "org/fake"})
        assert refused.status_code == 400 and "stays loaded" in refused.text


def test_nothing_is_added_to_what_a_server_of_one_model_says(fake_server: str) -> None:
    [card] = httpx.get(f"{fake_server}/v1/models").json()["data"]
    assert "loaded" not in card and "quire_model_" not in httpx.get(f"{fake_server}/metrics").text
    assert ollama.Client(host=fake_server).generate(model="org/fake", keep_alive=0).done_reason == "load"  # it stays
    assert [model.model for model in ollama.Client(host=fake_server).ps().models] == ["org/fake"]


# ---- the file ------------------------------------------------------------------------------------------------


def test_a_file_names_models_and_their_options(tmp_path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "models:\n"
        "  - {name: chat, model: org/one, max_model_len: 512, keep_alive: 10m}\n"
        "  - {model: org/two, pinned: true, lora: ['poet=files']}\n"
        "  - {name: late, model: org/three, keep_alive: -1}\n"
    )
    first, second, third = read_models_file(str(file), EngineOptions.of(threads=3, max_model_len=2048), 60.0)
    assert (first.name, second.name, third.name) == ("chat", "org/two", "late")
    assert (first.keep_alive, second.keep_alive, third.keep_alive) == (600.0, 60.0, float("inf"))
    assert (first.pinned, second.pinned) == (False, True)
    assert [one.engine.model.max_model_len for one in (first, second)] == [512, 2048]  # the command line's, unless said
    assert first.engine.device.threads == second.engine.device.threads == 3
    assert second.engine.adapters.named == {"poet": "files"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- model: x", "one key, models"),
        ("models: []", "1 to 256 entries"),
        ("models: [{model: x}]\nmore: 1", "one key, models"),
        ("models: [{name: x}]", "model 1: it needs model"),
        ("models: [{model: x}, {model: y, max_len: 5}]", "model 2: unknown option 'max_len'; did you mean max_"),
        ("models: [{model: x, n_ctx: 5}]", "it is called max_model_len here"),
        ("models: [{model: x, keepalive: 5m}]", "did you mean keep_alive"),
        ("models: [{model: x, keep_alive: soon}]", "keep_alive must be seconds"),
        ("models: [{model: x, keep_alive: true}]", "keep_alive must be seconds"),
        ("models: [{model: x, pinned: 1}]", "pinned must be true or false"),
        ("models: [{model: x, pinned: true, keep_alive: 5m}]", "no effect beside pinned"),
        ("models: [{model: x, threads: many}]", "threads must be a whole number"),
        ("models: [{model: x}, {model: x}]", "two models called 'x'"),
        ("models: [{model: x, name: 3}]", "name must be text"),
        ("models: [{model: x, kv_disk: d}, {model: y, kv_disk: d}]", "kv_disk is one engine's"),
        ("models: [!!python/object/apply:os.getcwd []]", "cannot read"),
        ("models: [", "cannot read"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path, text: str, message: str) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        read_models_file(str(file), EngineOptions(), 60.0)
    assert message in str(refusal.value)


@pytest.mark.parametrize("name", ["other", EngineOptions().model.model])
def test_a_model_is_named_in_the_file_or_on_the_command_line(
    tmp_path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.types.logs.configure", lambda *how, **more: None)  # logs of tests go elsewhere
    file = tmp_path / "models.yaml"
    file.write_text("models: [{model: x, threads: many}]")
    with pytest.raises(ConfigError, match=f"leave out '{name}'"):
        CliRunner().invoke(app, ["serve", name, "--models", str(file)], catch_exceptions=False)
    with pytest.raises(ConfigError, match="threads must be a whole number"):  # as far as it comes
        CliRunner().invoke(app, ["serve", "--port", "0", "--models", str(file)], catch_exceptions=False)


LIMITS = {"max_loaded_models": 2, "models_memory": "1G", "models_asleep": "1G", "keep_alive": "5m", "model_wait": 3.0}


def test_options_of_several_models_need_several_models(tmp_path) -> None:
    for name, value in LIMITS.items():
        with pytest.raises(ConfigError, match=f"{name} has no effect without models"):
            ServeOptions(**{name: value})  # type: ignore[arg-type]
        ServeOptions(models="m.yaml", **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="replicas is one model's"):
        ServeOptions(models="m.yaml", replicas=2)
    with pytest.raises(ConfigError, match="keep_alive must be"):
        ServeOptions(models="m.yaml", keep_alive="soon")
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (1 << 21))
    with pytest.raises(ConfigError, match="larger than"):
        read_models_file(str(big), EngineOptions(), 60.0)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        ("250ms", 0.25),
        (0, 0),
        ("0", 0),
        (90, 90),
        ("90", 90),
        (-1, None),
        ("-1m", None),
        (1e18, None),
    ],
)
def test_durations_are_read_as_ollama_reads_them(said: str | float, seconds: float | None) -> None:
    assert parse_keep_alive(said) == (float("inf") if seconds is None else seconds)


def test_a_duration_is_read_to_its_end() -> None:
    with pytest.raises(ConfigError, match="keep_alive must be seconds"):
        parse_keep_alive("1m" * 32 + "junk")


# ---- engines -------------------------------------------------------------------------------------------------

PROMPTS = ["The capital of France is", "Once upon a time", "2, 4, 6,", "def add(a, b):"]


@pytest.mark.slow
def test_models_of_which_one_fits_answer_as_each_would_alone(default_model: object, tmp_path: Path) -> None:
    options = {"default": EngineOptions.of(kv_memory="64M")}
    for seed in (1, 2):
        path = str(thinking_model.make(tmp_path / f"{seed}", seed))
        options[f"tiny {seed}"] = EngineOptions.of(model=path, kv_memory="16M")
    wanted: dict[str, list[str]] = {}
    for name, engine in options.items():
        with LLM(**engine.flat()) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
            wanted[name] = [output.outputs[0].text for output in outputs]
    assert len({tuple(texts) for texts in wanted.values()}) == 3
    models = [ServedModel(name, engine) for name, engine in options.items()]
    pools: list[ModelPool] = []

    async def start() -> ModelPool:
        serving = ServeOptions(models="models.yaml", max_loaded_models=1, model_wait=300.0)
        pools.append(await open_model_pool(models, serving, RestartPolicy()))
        return pools[0]

    async def ask(client: httpx.AsyncClient, model: str, at: int) -> None:
        body = {"model": model, "prompt": PROMPTS[at], "max_tokens": 12, "temperature": 0}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["model"] == model and answer["choices"][0]["text"] == wanted[model][at]

    async def all_at_once(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=600) as client:
            await asyncio.gather(*(ask(client, model, at) for at in range(len(PROMPTS)) for model in options))

    with background_server(start) as url:
        asyncio.run(all_at_once(url))
        asyncio.run(all_at_once(url))
        assert 4 <= sum(one.loads for one in pools[0].states()) <= 8  # for 24 requests: who waits shares a load
