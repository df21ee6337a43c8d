"""LoRA adapters over HTTP: loaded and unloaded as with vLLM, models by name in every API, there after a crash."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from fake_frontend import FakeFrontend
from safetensors.torch import save_file

from quire.engine.client import AsyncClient, RestartPolicy
from quire.engine.frontend import Frontend
from quire.serve.core.api_keys import ADMIN, INFERENCE, Key, KeyRing, digest
from quire.serve.http.server import background_server
from quire.text import TextModel
from quire.types.config import EngineOptions
from quire.types.errors import ModelNotFoundError
from quire.types.sampling_params import SamplingParams
from quire.types.serving import ServeOptions

BASE = "smollm2-135m"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


def write_adapter(directory: Path, seed: int) -> str:
    """A random adapter of the default model's queries and values that changes what it says."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(30):
        for name, rows in (("q_proj", 576), ("v_proj", 192)):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(8, 576, generator=generator) * 0.05
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, 8, generator=generator) * 0.1
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16}))
    return str(directory)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, seed) for seed, name in enumerate(("french", "poems"))}


@pytest.fixture(scope="module")
def server(default_model: Any, paths: dict[str, str]) -> Iterator[str]:
    async def frontend() -> Frontend:
        options = EngineOptions.of(kv_memory="256M", lora=[f"french={paths['french']}"], max_loras=2)
        client = await AsyncClient.open(options, process=False)
        return Frontend(client, TextModel.load(default_model), default_model.name)

    with background_server(frontend) as url:
        yield str(url)


def said(url: str, model: str) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.completions.create(model=model, prompt="The capital of France is", **GREEDY)
    assert answer.model == model.removeprefix(f"{BASE}:")
    return answer.choices[0].text


def test_adapters_answer_by_their_names(server: str, paths: dict[str, str]) -> None:
    plain, french = said(server, BASE), said(server, "french")
    assert plain != french == said(server, f"{BASE}:french")
    loaded = httpx.post(f"{server}/v1/load_lora_adapter", json={"lora_name": "poems", "lora_path": paths["poems"]})
    assert loaded.status_code == 200 and loaded.text == "Success: LoRA adapter 'poems' added successfully."
    assert said(server, "poems") not in (plain, french)
    cards = httpx.get(f"{server}/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        (BASE, BASE, None),
        ("french", paths["french"], BASE),
        ("poems", paths["poems"], BASE),
    ]
    assert httpx.get(f"{server}/v1/models/{BASE}:poems").json() == cards[2]
    gone = httpx.post(f"{server}/v1/unload_lora_adapter", json={"lora_name": "poems"})
    assert gone.status_code == 200 and gone.text == "Success: LoRA adapter 'poems' removed successfully."
    with pytest.raises(openai.NotFoundError, match="'poems'"):
        said(server, "poems")
    assert said(server, "french") == french and said(server, BASE) == plain


def test_every_family_knows_them(server: str) -> None:
    messages = [{"role": "user", "content": "Tell me about the sea."}]

    def anthropic(model: str) -> str:
        body = {"model": model, "messages": messages, **GREEDY}
        found = httpx.post(f"{server}/v1/messages", json=body).json()
        assert found["model"] == model
        return str(found["content"][0]["text"])

    def ollama(model: str) -> str:
        options = {"temperature": 0, "num_predict": 12}
        body = {"model": model, "messages": messages, "stream": False, "options": options}
        found = httpx.post(f"{server}/api/chat", json=body).json()
        assert found["model"] == model.removesuffix(":latest").removeprefix(f"{BASE}:")
        return str(found["message"]["content"])

    def streamed(model: str) -> str:
        client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
        text = ""
        for chunk in client.chat.completions.create(model=model, messages=messages, stream=True, **GREEDY):  # type: ignore[call-overload]
            assert chunk.model == model
            text += chunk.choices[0].delta.content or ""
        return text

    assert anthropic("french") == ollama("french:latest") == ollama(f"{BASE}:french") == streamed("french")
    assert anthropic(BASE) == ollama(BASE) == streamed(BASE) != anthropic("french")
    assert {model["name"] for model in httpx.get(f"{server}/api/tags").json()["models"]} == {BASE, "french"}
    vectors = [
        httpx.post(f"{server}/v1/embeddings", json={"model": model, "input": "sea"}).json()["data"][0]["embedding"]
        for model in (BASE, "french")
    ]
    assert vectors[0] != vectors[1]


def test_what_cannot_be_done_is_said(server: str, paths: dict[str, str], tmp_path: Path) -> None:
    def load(name: str, path: str) -> tuple[int, str]:
        found = httpx.post(f"{server}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
        return found.status_code, found.json()["error"]["message"]

    assert load("french", paths["poems"]) == (400, "an adapter 'french' is loaded already")
    assert load(BASE, paths["poems"]) == (400, f"'{BASE}' is the model itself")
    assert load("new", str(tmp_path)) == (400, f"{tmp_path} holds no LoRA adapter: there is no adapter_config.json")
    gone = httpx.post(f"{server}/v1/unload_lora_adapter", json={"lora_name": "poems"})
    assert (gone.status_code, gone.json()["error"]["message"]) == (404, "no adapter 'poems' is loaded")


def test_loading_is_for_operators() -> None:
    secrets = {"user": "user-secret-0123456789", "operator": "admin-secret-0123456789"}
    scopes = {"user": INFERENCE, "operator": ADMIN}
    keys = KeyRing([Key(name, digest(secret), frozenset({scopes[name]})) for name, secret in secrets.items()])
    with background_server(lambda: FakeFrontend(), ServeOptions(port=0, grace=1), keys=keys) as url:  # type: ignore[arg-type, return-value]
        for route in ("load", "unload"):
            for port in (str(url), url.admin):
                path = f"{port}/v1/{route}_lora_adapter"
                assert httpx.post(path, json={}).status_code == 401
                refused = httpx.post(path, json={}, headers={"authorization": f"Bearer {secrets['user']}"})
                assert refused.status_code == 403 and "admin" in refused.text
                reached = httpx.post(path, json={}, headers={"authorization": f"Bearer {secrets['operator']}"})
                assert reached.status_code == 400 and "lora_name" in reached.text


def test_a_new_engine_has_the_same_adapters(default_model: Any, paths: dict[str, str]) -> None:
    """After a crash: those loaded since are there, those unloaded are not."""

    async def life() -> None:
        options = EngineOptions.of(kv_memory="256M", lora=[f"french={paths['french']}"], max_loras=2)
        client = await AsyncClient.open(options, process=True, policy=RestartPolicy(max_restarts=1))
        frontend = Frontend(client, TextModel.load(default_model), BASE)
        params = SamplingParams(temperature=0, max_tokens=8)

        async def answer(lora: str) -> list[int]:
            request = frontend.prepare("The capital of France is", params, lora=lora)
            return (await frontend.collect(request)).outputs[0].token_ids

        try:
            await client.load_adapter("poems", paths["poems"])
            before = await answer("poems")
            assert before != await answer("french") != await answer("")
            await client.unload_adapter("french")
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            while client.restarts == 0:
                await asyncio.sleep(0.05)
            assert await answer("poems") == before
            with pytest.raises(ModelNotFoundError):
                await answer("french")
        finally:
            await client.close()

    asyncio.run(life())
