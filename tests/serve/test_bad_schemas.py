"""Schemas that cannot be used get a 400 soon, and answers that are being streamed meanwhile go on; good ones tell in
`usage` which tokens they forced."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest

SOON = 10.0  # seconds: a bound against what hangs, not a measure
LONG = 160  # tokens of the answers beside


BAD: dict[str, dict[str, Any]] = {
    "no such type": {"type": "strinng"},
    "no schema at all": {"type": "object", "properties": {"a": 3}},
    "never valid": {"type": "integer", "minimum": 5, "maximum": 1},
    "unsupported": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "remote": {"$ref": "https://example.com/schema.json"},
    "dangling": {"$ref": "#/$defs/nowhere"},
    "bad pattern": {"type": "string", "pattern": "(unclosed"},
    "oversized": {"enum": [f"value number {i}" for i in range(20_000)]},
    "a long way": {"$ref": "#/$defs/0", "$defs": {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(5000)}},
    "many ways to go on": {"properties": {f"p{i}": {"type": "string", "pattern": "(a|b)*c{1,9}"} for i in range(900)}},
    "many ways in many": {"anyOf": [{"properties": {f"p{j}": {"enum": [i, j]} for j in range(99)}} for i in range(9)]},
    "many optional": {"type": "object", "properties": {f"p{i}": {} for i in range(9000)}},
    "many patterns": {"type": "object", "patternProperties": {f"^k{i}x[a-z]*$": {"type": "null"} for i in range(400)}},
    "large divisor": {"type": "integer", "multipleOf": 999_983},
    "divisors that multiply": {"allOf": [{"type": "integer", "multipleOf": p} for p in (101, 103, 107, 109, 113)]},
}


class Stream(threading.Thread):
    """An answer under way; `tokens` counts what has come."""

    def __init__(self, url: str, model: str, prompt: str):
        super().__init__(daemon=True)
        self._url, self._model, self._prompt = url, model, prompt
        self.tokens, self.usage = 0, None
        self.moved = threading.Condition()

    def run(self) -> None:
        body = {"model": self._model, "prompt": self._prompt, "max_tokens": LONG, "ignore_eos": True, "temperature": 0,
                "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=120) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    with self.moved:
                        self.tokens += 1
                        self.usage = json.loads(line.removeprefix("data: ")).get("usage") or self.usage
                        self.moved.notify_all()

    def reach(self, tokens: int) -> None:
        with self.moved:
            assert self.moved.wait_for(lambda: self.tokens >= tokens, 120)


def model_of(http: httpx.Client) -> str:
    return str(http.get("/v1/models").json()["data"][0]["id"])


def ask(http: httpx.Client, schema: dict[str, Any]) -> httpx.Response:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": model_of(http), "messages": [{"role": "user", "content": "Reply in JSON."}], "max_tokens": 60}
    return http.post("/v1/chat/completions", json={**body, "response_format": format, "temperature": 0})


@pytest.fixture
def http(live_server: str):
    with httpx.Client(base_url=live_server, timeout=60) as client:
        yield client


def test_bad_schemas_are_refused_while_streams_go_on(live_server: str, http: httpx.Client) -> None:
    streams = [Stream(live_server, model_of(http), prompt) for prompt in ("Once upon a time", "The history of")]
    for stream in streams:
        stream.start()
    for stream in streams:
        stream.reach(3)
    began, took = [stream.tokens for stream in streams], {}
    for name, schema in BAD.items():
        start = time.perf_counter()
        answer = ask(http, schema)
        took[name] = time.perf_counter() - start
        error = answer.json()["error"]
        assert answer.status_code == 400, (name, answer.text[:300])
        assert error["message"] and error["type"] == "invalid_request_error", (name, error)
        assert error["param"] == "response_format" and error["code"] == "invalid_grammar", (name, error)
    assert max(took.values()) < SOON, took
    for before, stream in zip(began, streams, strict=True):
        stream.reach(before + 20)  # and they are not done: nothing was cut short
    for stream in streams:
        stream.join(120)
        assert stream.usage is not None and stream.usage["completion_tokens"] == LONG


def test_usage_counts_forced_tokens(http: httpx.Client) -> None:
    named = {"a_rather_long_name": {"type": "boolean"}, "another_quite_long_name": {"type": "boolean"}}
    schema = {"type": "object", "properties": named, "required": list(named), "additionalProperties": False}
    answer = ask(http, schema).json()
    assert json.loads(answer["choices"][0]["message"]["content"]).keys() == named.keys()
    forced = answer["usage"]["completion_tokens_details"]["forced_tokens"]
    assert 8 <= forced < answer["usage"]["completion_tokens"]
    free = http.post("/v1/completions", json={"model": model_of(http), "prompt": "Hello", "max_tokens": 4}).json()
    assert free["usage"]["completion_tokens_details"]["forced_tokens"] == 0


LARGE = {"enum": ["x" * 300_000]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": LARGE}}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
FORMAT = {"type": "json_schema", "name": "x", "schema": LARGE}


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("completions", {"prompt": "Hello", "guided_regex": "x" * 300_000}, "guided_regex"),
        ("completions", {"prompt": "Hello", "guided_json": LARGE}, "guided_json"),
        ("completions", {"prompt": "Hello", "guided_choice": ["x" * 300_000]}, "guided_choice"),
        ("chat/completions", {**CHAT, "structured_outputs": {"grammar": "x" * 300_000}}, "structured_outputs.grammar"),
        ("chat/completions", {**CHAT, "structured_outputs": {"json": LARGE}}, "structured_outputs.json"),
        ("chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}, "tools"),
        ("responses", {"input": "Hello", "text": {"format": FORMAT}}, "text.format"),
    ],
)
def test_a_grammar_too_large_is_called_by_its_field(http: httpx.Client, route: str, body: Any, param: str) -> None:
    answer = http.post(f"/v1/{route}", json={"model": model_of(http), **body})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text[:300]
