"""/tokenize and /detokenize against the model's own tokenizer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from quire.text import TextModel


@pytest.fixture
def http(live_server: str) -> httpx.Client:
    return httpx.Client(base_url=live_server, timeout=60)


def test_there_and_back(http: httpx.Client, default_model: Any) -> None:
    text = TextModel.load(default_model)
    found = http.post("/tokenize", json={"prompt": "Grüße, 你好!", "return_token_strs": True}).json()
    assert found["tokens"] == text.tokenizer.encode("Grüße, 你好!") and found["count"] == len(found["tokens"])
    assert len(found["token_strs"]) == found["count"] and found["max_model_len"] == 8192
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "Grüße, 你好!"}
    messages = [{"role": "user", "content": "hello"}]
    tool = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    for more in ({}, {"tools": [{"type": "function", "function": tool}]}, {"add_generation_prompt": False}):
        found = http.post("/tokenize", json={"messages": messages, **more}).json()
        assert found["tokens"] == text.encode_chat(messages, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompts": "a"}, "prompts"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_bad_bodies(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert http.post(path, json={**body, "model": "other"}).status_code in (400, 404)
