"""What operators and their tools ask of a server besides answers: /ping, /version, /load, /tokenizer_info."""

from __future__ import annotations

import httpx
from fake_frontend import CONTEXT, EOS, VOCAB, FakeClient, FakeFrontend

from quire import __version__
from quire.engine.model_pool import ModelPool
from quire.serve.http.server import ServerUrl, background_server
from quire.types.config import EngineOptions
from quire.types.errors import OverloadedError
from quire.types.models_file import ServedModel


def test_ping_says_what_ready_says(fake_server: str, fake_frontend: FakeFrontend) -> None:
    for route in ("health", "ready", "ping"):  # as balancers look
        answer = httpx.head(f"{fake_server}/{route}")
        assert (answer.status_code, answer.content) == (200, b"")
    for method in ("GET", "POST"):
        answer = httpx.request(method, f"{fake_server}/ping")
        assert (answer.status_code, answer.content) == (200, b"")
    fake_frontend.client.alive = False
    try:
        assert httpx.get(f"{fake_server}/ping").status_code == httpx.get(f"{fake_server}/ready").status_code == 503
    finally:
        fake_frontend.client.alive = True


def test_version(fake_server: str) -> None:
    assert httpx.get(f"{fake_server}/version").json() == {"version": __version__}


def test_load_counts_requests_under_way(fake_server: str, fake_frontend: FakeFrontend) -> None:
    def load() -> int:
        return int(httpx.get(f"{fake_server}/load").json()["server_load"])

    before = load()
    body = {"model": FakeFrontend.model_name, "prompt": "hang", "stream": True, "logprobs": 1}
    with httpx.stream("POST", f"{fake_server}/v1/completions", json=body, timeout=30):
        assert fake_frontend.hanging.acquire(timeout=20)
        assert load() == before + 1
    assert fake_frontend.aborted.acquire(timeout=20)


def test_tokenizer_info(fake_server: str) -> None:
    found = httpx.get(f"{fake_server}/tokenizer_info").json()
    assert (found["eos_token"], found["eos_token_id"], found["eos_token_ids"]) == ("<eos>", EOS, [EOS])
    assert found["added_tokens_decoder"] == {str(EOS): {"content": "<eos>", "special": True}}
    assert (found["model_max_length"], found["vocab_size"]) == (CONTEXT, VOCAB)
    assert found["chat_template"] and found["tokenizer_class"]


def test_live_tokenizer_info(live_server: str) -> None:
    found = httpx.get(f"{live_server}/tokenizer_info").json()
    assert found["eos_token"] == "<|im_end|>" and "<|im_start|>" in found["chat_template"]
    assert found["added_tokens_decoder"][str(found["eos_token_id"])]["content"] == "<|im_end|>"


def test_replicas_of_a_server_with_one_engine(fake_server: str) -> None:
    admin = fake_server.admin  # type: ignore[attr-defined]
    (one,) = httpx.get(f"{admin}/v1/replicas").json()["data"]
    assert {"id", "pid", "role", "state", "running", "waiting", "restarts"} <= one.keys() and one["state"] == "ready"
    for path in ("restart", f"{one['id']}/drain", f"{one['id']}/restart", f"{one['id']}/activate"):
        refused = httpx.post(f"{admin}/v1/replicas/{path}")
        assert refused.status_code == 400 and "one engine" in refused.json()["error"]["message"]
    for role, problem in (("prefill", "one engine"), ("both sides", "role")):
        refused = httpx.post(f"{admin}/v1/replicas/{one['id']}/role", json={"role": role})
        assert refused.status_code == 400 and problem in refused.json()["error"]["message"]
    assert httpx.get(f"{fake_server}/v1/replicas").status_code == 404  # operators' alone
    assert 'quire_replica_ready{replica="replica-0"} 1.0' in httpx.get(f"{admin}/metrics").text


def test_live_replicas(live_server: str) -> None:
    (one,) = httpx.get(f"{live_server.admin}/v1/replicas").json()["data"]  # type: ignore[attr-defined]
    assert (one["state"], one["role"], one["restarts"]) == ("ready", "both", 0) and one["pid"] > 1


def test_an_engine_sleeps_and_is_woken_by_a_request(live_server: ServerUrl) -> None:
    admin = httpx.Client(base_url=live_server.admin, timeout=120)

    def sleeps() -> bool:
        return bool(admin.get("/is_sleeping").json()["is_sleeping"])

    def ask() -> str:
        body = {"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        return str(httpx.post(f"{live_server}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"])

    first = ask()
    for route in ("/sleep?level=2", "/v1/engine/sleep"):
        assert admin.post(route).json() == {"asleep": True} and sleeps()
        assert ask() == first and not sleeps()
    assert admin.post("/sleep").status_code == 200 and sleeps()
    assert admin.post("/wake_up").json() == {"asleep": False} and not sleeps()
    refused = admin.post("/sleep?level=3")
    assert refused.status_code == 400 and "levels 1 and 2" in refused.text
    assert httpx.post(f"{live_server}/sleep").status_code == 404  # users must not


class SleepyClient(FakeClient):
    """Sleeps, unless it is busy."""

    def __init__(self, busy: bool) -> None:
        super().__init__()
        self.busy, self.level = busy, 0

    async def power(self, *, asleep: bool, level: int = 1) -> None:
        if self.busy:
            raise OverloadedError("requests are under way; the engine can sleep when they are done")
        self.level = level if asleep else 0


def test_of_several_models_those_sleep_that_can() -> None:
    clients = {"a": SleepyClient(busy=True), "b": SleepyClient(busy=False)}

    async def open_model(model: ServedModel, earlier: object) -> FakeFrontend:
        frontend = FakeFrontend()
        frontend.model_name, frontend.client = model.name, clients[model.name]
        return frontend

    async def started() -> ModelPool:
        pool = ModelPool([ServedModel(name, EngineOptions(), pinned=True) for name in clients], open_model)  # type: ignore[arg-type]
        await pool.start()
        return pool

    with background_server(started) as url:
        refused = httpx.post(f"{url.admin}/sleep?level=2")
        assert refused.status_code == 503 and "requests are under way" in refused.text
        assert (clients["a"].level, clients["b"].level) == (0, 2)
        clients["a"].busy = False
        assert httpx.post(f"{url.admin}/sleep").status_code == 200 and clients["a"].level == 1
