"""/tokenize and /detokenize against the model's own tokenizer."""

from __future__ import annotations

from typing import Any

import httpx
import openai
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
    more = http.post("/tokenize", json={"prompt": " and on", "continues": True}).json()
    assert more["tokens"] == text.tokenizer.encode_on(" and on")
    messages = [{"role": "user", "content": "hello"}]
    tool = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    for more in ({}, {"tools": [{"type": "function", "function": tool}]}, {"add_generation_prompt": False}):
        found = http.post("/tokenize", json={"messages": messages, **more}).json()
        assert found["tokens"] == text.encode_chat(messages, **more)  # type: ignore[arg-type]


def test_token_ids_to_go_on_from(http: httpx.Client, live_server: str) -> None:
    """Ids given and sent back mean the same text, whole or streamed, cut by a stop string or not."""
    client = openai.OpenAI(base_url=f"{live_server}/v1", api_key="none")
    name = client.models.list().data[0].id
    ask: dict[str, Any] = {"model": name, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    ids = {"return_token_ids": True}
    whole = client.completions.create(**ask, extra_body=ids).choices[0]
    extra = whole.model_extra or {}
    assert extra["covered"] == {"tokens": len(extra["token_ids"]), "characters": len(whole.text)}
    streamed: list[int] = []
    for chunk in client.completions.create(**ask, stream=True, extra_body=ids):
        streamed += (chunk.choices[0].model_extra or {})["token_ids"]
    assert streamed == extra["token_ids"]
    stop = whole.text[3:6]  # somewhere inside
    cut = client.completions.create(**ask, stop=stop, extra_body=ids).choices[0]
    extra = cut.model_extra or {}
    kept = extra["token_ids"][: extra["covered"]["tokens"]]
    said = http.post("/detokenize", json={"tokens": kept}).json()["prompt"]
    assert said == cut.text[: extra["covered"]["characters"]] and len(cut.text) - len(said) < len(stop) + 12
    assert "token_ids" not in (client.completions.create(**ask).choices[0].model_extra or {})


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
