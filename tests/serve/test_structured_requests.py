"""Structured output over HTTP: tools with the keys they declare, one tool that cannot be kept to among others, tags,
and grammars whose outcome does not depend on what ran before."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from quire.bench.grammar_storm import grammars, storm

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 10}}, "required": ["city"]}
UNKEPT = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True, "items": {"type": "string"}}}}


@pytest.fixture(scope="module")
def http(live_server: str):
    with httpx.Client(base_url=live_server, timeout=120) as client:
        yield client


def function(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **given, **more}}


def call(http: httpx.Client, tools: list[dict[str, Any]], seed: int = 1, **more: Any) -> httpx.Response:
    model = http.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": f"Look something up, please, number {seed}."}],
            "tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0, "seed": seed,
            "max_tokens": 100, **more}  # fmt: skip
    return http.post("/v1/chat/completions", json=body)


def arguments(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text[:500]
    (made,) = response.json()["choices"][0]["message"]["tool_calls"]
    return json.loads(made["function"]["arguments"])


def test_calls_have_the_keys_that_are_declared(http: httpx.Client) -> None:
    for seed in range(4):
        assert arguments(call(http, [function("look_up", CITY)], seed)).keys() == {"city"}
    assert arguments(call(http, [function("look_up")])) == {}


def test_a_tool_that_cannot_be_kept_to_is_named_and_the_others_are_kept(http: httpx.Client) -> None:
    tools = [function("good", CITY), function("unkept", UNKEPT), *(function(f"t{i}", CITY) for i in range(8))]
    answer = call(http, tools)
    assert answer.status_code == 200, answer.text[:500]
    warning = answer.headers["x-quire-warning"]
    assert "unkept" in warning and "uniqueItems" in warning and "good" not in warning
    named = call(http, tools, tool_choice={"type": "function", "function": {"name": "good"}})
    assert arguments(named).keys() == {"city"} and "x-quire-warning" not in named.headers
    alone = call(http, [function("unkept", UNKEPT)])
    assert alone.status_code == 400 and alone.json()["error"]["param"] == "tools"


def test_what_dies_at_its_first_string_is_refused_before_it_starts(http: httpx.Client) -> None:
    model = http.get("/v1/models").json()["data"][0]["id"]
    text = {"type": "string", "pattern": r"^$|(^(?:\S+\s+){0,99}\S+$)", "maxLength": 5000}
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "q": text}}
    body = {"model": model, "prompt": "x", "max_tokens": 8, "guided_json": schema, "stream": True}
    for _ in range(2):
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 400 and "too complex" in answer.text, answer.text[:300]


def test_structural_tags(http: httpx.Client) -> None:
    model = http.get("/v1/models").json()["data"][0]["id"]
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "end": "</a>",
           "content": {"type": "json_schema", "json_schema": CITY}}}  # fmt: skip
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 60, "temperature": 0}
    answer = http.post("/v1/chat/completions", json={**body, "response_format": tag}).json()
    text = answer["choices"][0]["message"]["content"]
    assert json.loads(text.removeprefix("<a>").removesuffix("</a>")).keys() == {"city"}


def test_no_outcome_depends_on_what_ran_before(live_server: str) -> None:
    many = grammars(12, seed=3)
    found = [asyncio.run(storm(live_server, random.Random(n).sample(many, len(many)), streams=2)) for n in range(2)]
    assert found[0].outcomes == found[1].outcomes and len(found[0].outcomes) == len(many)
    assert found[0].statuses.keys() == {200, 400} and found[0].gaps and found[1].gaps
