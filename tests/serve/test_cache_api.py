"""/v1/cache on the admin port, over a real engine: look, warm, pin, drop, export and import; and sessions."""

import httpx
import pytest

PROMPT = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture(scope="module")
def server(default_model, tmp_path_factory):
    from quire.engine.client import AsyncClient
    from quire.engine.frontend import Frontend
    from quire.serve import background_server
    from quire.text import TextModel
    from quire.types.config import EngineOptions

    folder = tmp_path_factory.mktemp("kv")

    async def frontend():
        options = EngineOptions.of(kv_pages=200, max_model_len=1024, threads=1, kv_host="64M", kv_disk=f"{folder}:64M")
        client = await AsyncClient.open(options, process=False)
        return Frontend(client, TextModel.load(default_model), default_model.name)

    with background_server(frontend) as url:
        yield url


def ask(server, action, **body):
    answer = httpx.post(f"{server.admin}/v1/cache/{action}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(server, **more):
    body = {"model": "smollm2-135m", "prompt": PROMPT, "max_tokens": 1, "temperature": 0, **more}
    answer = httpx.post(f"{server}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_warmed_prompt_hits(server):
    warmed = ask(server, "warm", prompt=PROMPT)
    usage = complete(server)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert warmed["tokens"] == usage["prompt_tokens"] and warmed["device_cached"] > 0
    report = httpx.get(f"{server.admin}/v1/cache").json()
    assert [tier["name"] for tier in report["tiers"]] == ["host", "disk"] and report["rates"]["tokens"] > 0


def test_pinned_pages_are_in_use_until_dropped(server):
    ask(server, "warm", prompt=PROMPT)
    pinned = ask(server, "pin", prompt=PROMPT, seconds=60)
    assert pinned["pages"] >= 5 and pinned["sessions"][0]["session"].startswith("pin:")


def test_dropped_pages_are_gone_everywhere(server):
    other = "Something else entirely, told at length. " * 8
    warmed = ask(server, "warm", prompt=other)
    # On the device at least; how many have reached the disk by now is a matter of how busy the machine is.
    assert ask(server, "drop", prompt=other)["pages"] >= warmed["tokens"] // 16
    assert complete(server, prompt=other)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_an_exported_prefix_comes_back_with_import(server):
    text = "A document that another machine has read already. " * 16
    cold = complete(server, prompt=text, max_tokens=8)["choices"][0]["text"]
    bundle = httpx.post(f"{server.admin}/v1/cache/export", json={"prompt": text}, timeout=60)
    assert bundle.status_code == 200 and len(bundle.content) > 5 * 368_640
    ask(server, "drop", prompt=text)
    taken = httpx.post(f"{server.admin}/v1/cache/import", content=bundle.content, timeout=60).json()
    assert taken["pages"] >= 5
    again = complete(server, prompt=text, max_tokens=8)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 80 and again["choices"][0]["text"] == cold
    damaged = bytearray(bundle.content)
    damaged[1000] ^= 1
    refused = httpx.post(f"{server.admin}/v1/cache/import", content=bytes(damaged), timeout=60)
    assert refused.status_code == 400 and "damaged" in refused.text
    nothing = httpx.post(f"{server.admin}/v1/cache/export", json={"prompt": "Never heard of. " * 20}, timeout=60)
    assert nothing.status_code == 400 and "warm it first" in nothing.text


def test_pages_that_left_the_device_come_back_and_are_explained(server):
    text = "What a tier has delivered, a request can tell. " * 16
    cold = complete(server, prompt=text, max_tokens=8)["choices"][0]["text"]
    ask(server, "drop", prompt=text, tiers=["device"])
    warm = complete(server, prompt=text, max_tokens=8)
    assert warm["choices"][0]["text"] == cold
    (told,) = httpx.get(f"{server}/v1/requests/{warm['id']}/explain").json()["data"]
    prefix = told["prefix"]
    assert sum(prefix["tier_tokens"].values()) == prefix["cached_tokens"] >= 96 and prefix["saved_s"] > 0
    assert prefix["moved_bytes"] == prefix["cached_pages"] * 368_640
    metrics = httpx.get(f"{server.admin}/metrics").text
    assert "quire_kv_tier_hit_tokens_total{" in metrics and 'tier="disk"' in metrics


MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 1}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
        ("/api/chat", {"messages": MESSAGES, "stream": False, "options": {"num_predict": 1}}),
        ("/api/generate", {"prompt": PROMPT, "stream": False, "options": {"num_predict": 1}}),
    ],
)
def test_sessions_keep_pages(server, path, body):
    named = {"model": "smollm2-135m", "session_id": f"agent of {path}", "session_ttl": 30}
    answer = httpx.post(f"{server}{path}", json={**body, **named}, timeout=60)
    assert answer.status_code == 200, answer.text
    held = {session["session"]: session for session in httpx.get(f"{server.admin}/v1/cache").json()["sessions"]}
    assert held[f"agent of {path}"]["pages"] > 0 and 0 < held[f"agent of {path}"]["seconds"] <= 30
    for ttl in (0, 100_000):
        refused = httpx.post(f"{server}{path}", json={**body, **named, "session_ttl": ttl})
        assert refused.status_code == 400 and "session_ttl" in refused.text


def test_mistakes_are_explained(server):
    for action, body, words in (
        ("pin", {}, "name the prompt"),
        ("drop", {"tiers": ["attic"]}, "no tier is called 'attic'"),
        ("warm", {"prompt": "x", "key": "nobody"}, "no key called 'nobody'"),
    ):
        answer = httpx.post(f"{server.admin}/v1/cache/{action}", json=body)
        assert answer.status_code == 400 and words in answer.text


def test_cache_stats_on_the_command_line(server):
    from typer.testing import CliRunner

    from quire.cli.main import app

    shown = CliRunner().invoke(app, ["cache", "stats", server.admin])
    assert shown.exit_code == 0 and "disk" in shown.output and "hit rate" in shown.output
