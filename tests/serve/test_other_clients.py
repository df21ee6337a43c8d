"""What people build with, against a live server: every client in `public_clients` and `js_clients.mjs`, every task.
Heavy installs: the extra `clients`, which `make test-all` adds, and npm's packages, fetched where npm and its
registry are there; what is not there is skipped, and pytest says so."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_frontend import FakeFrontend
from public_clients import CLIENTS, FREE, FUNCTION, QUESTION, Capital, Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TASKS = ("chat", "stream", "tools", "structure")
JS = Path(__file__).with_name("js_clients.mjs")
JS_PACKAGES = ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "@openai/agents", "zod")
JS_CLIENTS = (
    "ai (@ai-sdk/openai, chat)",
    "ai (@ai-sdk/openai, responses)",
    "ai (@ai-sdk/openai-compatible)",
    "ai (@ai-sdk/anthropic)",
    "@openai/agents (chat)",
    "@openai/agents (responses)",
)


@pytest.fixture(scope="module")
def model(live_server: str) -> str:
    return str(httpx.get(f"{live_server}/v1/models").json()["data"][0]["id"])


def check(task: str, result: Any) -> None:
    if task == "chat":
        assert isinstance(result, str) and result.strip()
    elif task == "stream":
        assert len(result) > 2 and "".join(result).strip()
    elif task == "tools":
        name, arguments = result
        assert name == FUNCTION["name"]
        Capital.model_validate(arguments)
    else:
        Capital.model_validate(result)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", CLIENTS)
def test_client(
    name: str, task: str, live_server: str, model: str, fake_server: str, fake_frontend: FakeFrontend, says: Any
) -> None:
    kind = CLIENTS[name]
    pytest.importorskip(kind.package)
    if getattr(kind, task) is getattr(Client, task):
        pytest.skip(f"{name} has no {task}")
    client = kind(live_server, model)
    if task == "tools" and name in FREE:  # the model may choose, and ours is too small to
        call = {"name": FUNCTION["name"], "arguments": {"country": "France", "city": "Paris"}}
        says(f"<tool_call>{json.dumps(call)}</tool_call>")
        client = kind(fake_server, FakeFrontend.model_name)
    check(task, getattr(client, task)())


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("there is no npm here")
    folder = tmp_path_factory.mktemp("npm")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *JS_PACKAGES]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        pytest.skip("npm could not fetch the packages in time")
    if done.returncode:
        pytest.skip(f"npm could not fetch the packages: {done.stderr.strip()[-300:]}")
    shutil.copy(JS, folder)
    return folder


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", JS_CLIENTS)
def test_javascript_client(name: str, task: str, live_server: str, model: str, node_folder: Path) -> None:
    command = ["node", JS.name, name, task, str(live_server), model]
    done = subprocess.run(command, cwd=node_folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    check(task, json.loads(done.stdout))


def test_langchain_embeddings(live_server: str, model: str) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    vectors = langchain_openai.OpenAIEmbeddings(
        base_url=f"{live_server}/v1", api_key="none", model=model, check_embedding_ctx_length=False
    ).embed_documents(["a", "b"])
    assert len(vectors) == 2 and len(vectors[0]) > 100


def test_dspy(live_server: str, model: str) -> None:
    dspy = pytest.importorskip("dspy")

    def lm(**more: Any) -> Any:
        options = {
            "api_base": f"{live_server}/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 64,
            "cache": False,
        }
        return dspy.LM(f"openai/{model}", **options, **more)

    assert lm()(QUESTION)[0]
    # A model this small does not write JSON because it was asked to; an extension of ours binds it.
    schema = {**Capital.model_json_schema(), "additionalProperties": False}
    with dspy.context(lm=lm(extra_body={"guided_json": schema}), adapter=dspy.JSONAdapter()):
        answer = dspy.Predict("question -> country, city")(question=QUESTION)
    assert isinstance(answer.city, str) and isinstance(answer.country, str)
