"""Request bodies, mutated: whatever is sent, it is answered, or refused in the shape of its own API; it is no fault.

Good bodies of every route are changed as bytes and as trees; the application is called directly, without sockets.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from fake_frontend import FakeFrontend

from quire.serve.http.app import create_app, create_serving

MODEL = FakeFrontend.model_name
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}

SEEDS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "1", "tool_call_id": "1"},
            ],
            "max_tokens": 2, "temperature": 0.5, "n": 2, "stop": ["x"], "logit_bias": {"3": -1}, "seed": 3,
            "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto", "parallel_tool_calls": False,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            "logprobs": True, "top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True},
            "service_tier": "flex", "chat_template_kwargs": {"a": [1]}, "metadata": {"a": "b"}, "deadline_ms": 60000,
        },
    ),
    ("/v1/chat/completions", {"model": MODEL, "messages": [USER], "max_tokens": 1, "guided_regex": "a"}),
    (
        "/v1/completions",
        {
            "model": MODEL, "prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1, "echo": True, "stop": "x",
            "guided_choice": ["a", "b"], "bad_words": ["c"], "stop_token_ids": [1], "min_p": 0.1, "top_k": 3,
        },
    ),
    ("/v1/completions", {"model": MODEL, "prompt": [[1, 2], [3]], "max_tokens": 1, "prompt_logprobs": 1}),
    (
        "/v1/responses",
        {
            "model": MODEL,
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "x"},
                {"type": "reasoning", "id": "r", "summary": []},
            ],
            "instructions": "x", "max_output_tokens": 2, "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "f"}, "text": {"format": {"type": "json_object"}},
            "reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"], "top_logprobs": 1,
            "stream": True, "store": True, "metadata": {},
        },
    ),
    ("/v1/score", {"model": MODEL, "text_1": "a", "text_2": ["b", "c"], "truncate_prompt_tokens": 8}),
    ("/v1/rerank", {"model": MODEL, "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    ("/classify", {"model": MODEL, "input": ["a", "b"]}),
    ("/v1/embeddings", {"model": MODEL, "input": ["a", "b"], "dimensions": 2, "encoding_format": "base64"}),
    (
        "/v1/messages",
        {
            "model": MODEL, "max_tokens": 2, "system": [{"type": "text", "text": "s"}],
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]},
            ],
            "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}, "stop_sequences": ["x"],
            "thinking": {"type": "enabled", "budget_tokens": 10}, "temperature": 1, "top_p": 0.5, "stream": True,
        },
    ),
    ("/v1/messages/count_tokens", {"model": MODEL, "messages": [USER], "system": "s"}),
    (
        "/api/chat",
        {
            "model": MODEL, "messages": [USER, {"role": "assistant", "content": "x"}], "format": SCHEMA, "think": "low",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}], "keep_alive": "5m",
            "options": {"num_predict": 2, "temperature": 0.1, "stop": ["x"], "seed": 1, "num_ctx": 10},
        },
    ),
    ("/api/generate", {"model": MODEL, "prompt": "a", "options": {"num_predict": 1}, "raw": True, "logprobs": True}),
    ("/api/embed", {"model": MODEL, "input": ["a"], "truncate": True}),
    ("/api/show", {"model": MODEL}),
    ("/tokenize", {"messages": [USER], "return_token_strs": True, "chat_template_kwargs": {"a": 1}}),
    ("/tokenize", {"prompt": "a", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/batches", {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}),
]  # fmt: skip

STRANGE: list[Callable[[random.Random], Any]] = [
    lambda r: None,
    lambda r: r.choice([True, False]),
    lambda r: r.choice([0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 129, 65]),
    lambda r: r.choice([0.0, -0.5, 1e308, 5e-324, 1.5, 1e999, float("nan")]),
    lambda r: r.choice(["", "a", "\0", "\ud800", "é" * 50, "none", "auto", "text", "1", "[", "x" * 600]),
    lambda r: [],
    lambda r: {},
    lambda r: [[]] * r.randrange(3),
    lambda r: {"type": r.choice(["text", "function", "object", "x", None, 1])},
    lambda r: {"$ref": "#"},
    lambda r: nested(r.choice([5, 70, 1200])),
]


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    found, left = [], [tree]
    while left:
        part = left.pop()
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            found.append((part, key))
            if isinstance(value, dict | list):
                left.append(value)
    return found


def mutated_tree(body: dict[str, Any], r: random.Random) -> bytes:
    tree = copy.deepcopy(body)
    for _ in range(r.choice([1, 1, 1, 2, 3])):
        container, key = r.choice(places(tree) or [(tree, "model")])
        change = r.randrange(6)
        if change == 0:
            container.pop(key) if isinstance(container, list) else container.pop(key, None)
        elif change == 1 and isinstance(container, dict):
            name = r.choice(["x", "model", "stream", "type", "role", "content", "name", "messages", ""])
            container[name] = r.choice(STRANGE)(r)
        elif change == 2 and isinstance(container, list):
            container *= r.choice([2, 50])
        elif change == 3:
            container[key] = copy.deepcopy(r.choice([owner[place] for owner, place in places(body)]))
        else:
            container[key] = r.choice(STRANGE)(r)
    try:
        return json.dumps(tree).encode()
    except RecursionError:
        return b"[" * 5000


def mutated_bytes(body: dict[str, Any], r: random.Random) -> bytes:
    raw = bytearray(json.dumps(body).encode())
    for _ in range(r.choice([1, 1, 2, 8])):
        at = r.randrange(len(raw))
        change = r.randrange(5)
        if change == 0:
            raw[at] = r.randrange(256)
        elif change == 1:
            del raw[at : at + r.choice([1, 10])]
        elif change == 2:
            raw[at:at] = r.choice([b"{", b"}", b'"', b",", b"null", b"\\ud800", b"\xff", b"1e999", b"-", b"[]"])
        elif change == 3:
            raw[at:at] = raw[at : at + 20]
        else:
            del raw[at:]
        if not raw:
            return b""
    return bytes(raw)


async def post(app: Any, path: str, body: bytes) -> tuple[int, bytes]:
    sent = [{"type": "http.request", "body": body, "more_body": False}]
    status, parts = 0, []

    async def receive() -> Any:
        return sent.pop() if sent else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": headers, "http_version": "1.1", "scheme": "http", "server": ("localhost", 80), "root_path": "",
        "client": ("127.0.0.1", 1),
    }  # fmt: skip
    await app(scope, receive, send)
    return status, b"".join(parts)


def check(path: str, status: int, answer: bytes, body: bytes) -> None:
    assert status == 200 or 400 <= status < 500, (path, status, answer[:500], body[:2000])
    if status != 200:
        error = json.loads(answer)
        if path.startswith("/v1/messages"):
            good = error["type"] == "error" and error["error"]["message"]
        elif path.startswith("/api/"):
            good = isinstance(error["error"], str) and error["error"]
        else:
            good = set(error["error"]) == {"message", "type", "param", "code"}
        assert good, (path, answer)
    else:
        assert b"internal error" not in answer, (path, answer[:500], body[:2000])


async def storm(count: int, seed: int) -> Counter[int]:
    app = create_app(create_serving(FakeFrontend()))  # type: ignore[arg-type]
    r = random.Random(seed)
    seen: Counter[int] = Counter()
    async with app.router.lifespan_context(app):
        for path, seed_body in SEEDS:
            status, answer = await post(app, path, json.dumps(seed_body).encode())
            assert status == 200 or path in ("/v1/batches", "/classify"), (path, answer)
        for _ in range(count):
            path, seed_body = r.choice(SEEDS)
            body = (mutated_bytes if r.random() < 0.3 else mutated_tree)(seed_body, r)
            status, answer = await post(app, path, body)
            check(path, status, answer, body)
            seen[status] += 1
    return seen


def test_some_thousand_bodies() -> None:
    seen = asyncio.run(storm(3000, 1))
    assert seen[200] > 200 and seen[400] > 1000


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_bodies() -> None:
    seen = asyncio.run(storm(100_000, 2))
    print(dict(seen))
    assert sum(seen.values()) == 100_000 and seen[200] > 5000
