"""Explaining requests and looking at the engine, over a live server on the real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_frontend import FakeFrontend

from quire.serve.core.api_keys import ADMIN, INFERENCE, Key, KeyRing, digest
from quire.serve.http.server import background_server
from quire.types.serving import ServeOptions
from quire.types.timeline import PrefixOutcome, Timeline

ALICE, BOB, OPERATOR = "alice-secret-0123456789", "bob-secret-0123456789", "admin-secret-0123456789"


@pytest.fixture
def http(live_server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live_server, timeout=120) as client:
        yield client


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "smollm2-135m", "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def explained(http: httpx.Client, id: str) -> list[dict[str, Any]]:
    answer = http.get(f"/v1/requests/{id}/explain")
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]  # type: ignore[no-any-return]


def test_where_the_time_went_and_why_the_prefix_hit(http: httpx.Client) -> None:
    prompt = list(range(2000, 2070))  # 70 tokens: four full pages and a rest
    cold = explained(http, complete(http, prompt=prompt)["id"])[0]
    assert cold["state"] == "ended" and cold["error"] is None
    assert (cold["prefix"]["reason"], cold["prefix"]["cached_tokens"]) == ("new", 0)
    assert cold["prefix"]["first_missing_page"] == 0 and cold["prefix"]["first_missing_tokens"] == [0, 16]
    branch = cold["branches"][0]
    assert (branch["state"], branch["output_tokens"]) == ("length", 4)
    assert [chunk["tokens"] for chunk in branch["prefill_chunks"]] == [70]
    parts = cold["prepare_s"] + branch["queue_s"] + branch["prefill_s"] + branch["decode_s"]
    assert 0 < parts <= cold["total_s"] + 1e-6  # the rest is the way from the engine to the client
    assert branch["prefill_s"] > 0 and branch["decode_s"] > 0 and branch["preempted_s"] == 0

    warm = explained(http, complete(http, prompt=prompt)["id"])[0]
    assert (warm["prefix"]["reason"], warm["prefix"]["cached_tokens"]) == ("full", 69)
    assert (warm["prefix"]["cached_pages"], warm["prefix"]["first_missing_page"]) == (4, None)
    assert [chunk["tokens"] for chunk in warm["branches"][0]["prefill_chunks"]] == []

    fork = explained(http, complete(http, prompt=[*prompt[:40], *range(3000, 3030)])["id"])[0]
    assert (fork["prefix"]["reason"], fork["prefix"]["cached_tokens"]) == ("new", 40)
    assert fork["prefix"]["first_missing_tokens"] == [40, 48]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": [2500] * 5}, "short"),
        ({"prompt": [2501] * 40, "prompt_logprobs": 0}, "scored"),
        ({"prompt": [2000 + i for i in range(70)], "cache_salt": "elsewhere"}, "salt"),
    ],
)
def test_reasons(http: httpx.Client, fields: dict[str, Any], reason: str) -> None:
    complete(http, prompt=list(range(2000, 2070)))  # what the salted one differs from by its salt alone
    report = explained(http, complete(http, **fields)["id"])[0]
    assert report["prefix"]["reason"] == reason and report["prefix"]["explanation"]


def test_found_by_call_and_by_answer(http: httpx.Client) -> None:
    body = {"model": "smollm2-135m", "prompt": ["one two", "three four"], "max_tokens": 2, "n": 2}
    answer = http.post("/v1/completions", json=body, headers={"x-request-id": "my-own-id"})
    by_call = explained(http, "my-own-id")
    assert [len(report["branches"]) for report in by_call] == [2, 2]
    assert [r["id"] for r in explained(http, answer.json()["id"])] == [r["id"] for r in by_call]
    assert http.get("/v1/requests/nobody/explain").json()["error"]["code"] == "request_not_found"


def test_running_requests_can_be_explained_and_stopped_ones_too(http: httpx.Client) -> None:
    body = {"model": "smollm2-135m", "prompt": [2600] * 40, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json={**body, "logprobs": 0}) as stream:
        lines = stream.iter_lines()  # kept: to let go of it is to hang up
        first = next(line for line in lines if line.startswith("data: "))
        id = json.loads(first.removeprefix("data: "))["id"]
        running = explained(http, id)[0]
        assert running["state"] == "running" and running["branches"][0]["state"] == "decode"
        picture = http.get("/view").json()
        shown = {sequence[0]: sequence for sequence in picture["engine"]["sequences"]}
        assert shown[id][2] == "running" and shown[id][4] == 40
        assert f"{id}/0" in picture["engine"]["owners"]
        tier = picture["engine"]["tiers"][0]
        owned = sum(cell >= 3 for cell in tier["cells"])
        assert tier["used"] >= owned >= 3 and len(tier["cells"]) == tier["total"]
        assert picture["engine"]["prefixes"] and picture["engine"]["steps"]
    for _ in range(200):  # the server notices when it next writes
        stopped = explained(http, id)[0]
        if stopped["branches"][0]["state"] == "abort":
            break
    assert stopped["branches"][0]["state"] == "abort" and stopped["branches"][0]["output_tokens"] >= 1
    waste = [line for line in http.get("/metrics").text.splitlines() if 'cause="cancelled"' in line]
    assert float(waste[0].split()[-1]) >= 40


def test_pictures_stream(http: httpx.Client) -> None:
    with http.stream("GET", "/view", params={"stream": True}) as stream:
        lines = (line for line in stream.iter_lines() if line)
        pictures = [json.loads(next(lines).removeprefix("data: ")) for _ in range(3)]
    assert all(picture["ready"] and picture["model"] == "smollm2-135m" for picture in pictures)


async def salted(request_id: str) -> list[Timeline]:
    """What an engine says of a prompt it knows under another salt."""
    return [
        Timeline(
            request=request_id, branch=0, prompt=70, arrival=1.0, admitted=2.0, first_token=3.0, ended=4.0,
            finish="stop", outputs=2, cached=0, prefix=PrefixOutcome.SALT, page_size=16,
        )
    ]  # fmt: skip


def test_a_key_sees_its_own_requests_only() -> None:
    keys = KeyRing(
        [
            Key("alice", digest(ALICE), frozenset({INFERENCE})),
            Key("bob", digest(BOB), frozenset({INFERENCE})),
            Key("operator", digest(OPERATOR), frozenset({ADMIN, INFERENCE})),
        ]
    )
    frontend = FakeFrontend()
    frontend.client.timelines = salted  # type: ignore[method-assign]
    with (
        background_server(lambda: frontend, ServeOptions(port=0, grace=1), keys=keys) as url,  # type: ignore[arg-type, return-value]
        httpx.Client(base_url=url) as http,
    ):

        def get(path: str, secret: str) -> httpx.Response:
            return http.get(path, headers={"authorization": f"Bearer {secret}"})

        body = {"model": frontend.model_name, "prompt": "hello"}
        id = http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {ALICE}"}).json()["id"]
        path = f"/v1/requests/{id}/explain"
        assert http.get(path).status_code == 401
        stranger, nobody = get(path, BOB), get("/v1/requests/nobody/explain", BOB)
        assert stranger.status_code == nobody.status_code == 404
        assert stranger.json()["error"]["message"].replace(id, "nobody") == nobody.json()["error"]["message"]
        mine = get(path, ALICE).json()["data"][0]
        assert mine["prefix"]["reason"] == "new"  # that somebody else asked the same is not hers to know
        assert mine["branches"][0]["queue_s"] == 1.0
        assert get(path, OPERATOR).json()["data"][0]["prefix"]["reason"] == "salt"
        assert get("/view", ALICE).status_code == 403
        assert http.get("/view").status_code == 401


def test_requests_are_listed(http: httpx.Client) -> None:
    id = complete(http, prompt=list(range(4000, 4040)), max_tokens=5)["id"]
    listed = http.get("/v1/requests", params={"limit": 5}).json()["data"]
    assert len(listed) <= 5 and http.get("/v1/requests", params={"limit": -1}).json()["data"] == []
    one = next(request for request in listed if request["id"].startswith(id))
    assert (one["prompt_tokens"], one["output_tokens"], one["finish"], one["error"]) == (40, 5, "length", "")
    assert one["arrived"] + one["ttft_s"] <= one["ended"] and 0 < one["tpot_s"] * 4 <= one["ended"] - one["arrived"]


def test_a_running_request_is_cancelled_by_its_key_or_an_operator_alone(http: httpx.Client) -> None:
    body = {"model": "smollm2-135m", "prompt": "Count.", "max_tokens": 7000, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        first = json.loads(next(line for line in lines if line).removeprefix("data: "))
        assert http.delete(f"/v1/requests/{first['id']}").json() == {"id": first["id"], "cancelled": True}
        assert any("aborted" in line for line in lines)  # and the stream ends
    assert http.delete(f"/v1/requests/{first['id']}").json()["cancelled"] is False
    assert http.delete("/v1/requests/nothing").status_code == 404


def test_keys_see_their_own_requests_only() -> None:
    keys = KeyRing(
        [
            Key("alice", digest(ALICE), frozenset({INFERENCE})),
            Key("bob", digest(BOB), frozenset({INFERENCE})),
            Key("operator", digest(OPERATOR), frozenset({INFERENCE, ADMIN})),
        ]
    )
    frontend = FakeFrontend()
    with background_server(lambda: frontend, ServeOptions(port=0, grace=1), keys=keys) as url:  # type: ignore[arg-type, return-value]

        def ask(method: str, path: str, key: str, **more: Any) -> httpx.Response:
            return httpx.request(method, url + path, headers={"authorization": f"Bearer {key}"}, **more)

        body = {"model": FakeFrontend.model_name, "prompt": "hello"}
        id = ask("POST", "/v1/completions", ALICE, json=body).json()["id"]
        counts = {key: len(ask("GET", "/v1/requests", key).json()["data"]) for key in (ALICE, BOB, OPERATOR)}
        assert counts == {ALICE: 1, BOB: 0, OPERATOR: 1}
        assert ask("DELETE", f"/v1/requests/{id}", BOB).status_code == 404
        assert ask("DELETE", f"/v1/requests/{id}", OPERATOR).json() == {"id": id, "cancelled": False}
