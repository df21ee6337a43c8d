"""Several models by one command, two with replicas on a Ray of the server's own: loaded, killed and unloaded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from live_server import MODEL, live_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MODELS = f"""models:
  - {{name: chat, model: {MODEL}, replicas: 2, router: slo-aware}}
  - {{name: alone, model: {MODEL}}}
  - {{name: org/other, model: {MODEL}, replicas: 1, max_replicas: 2}}
"""
PROMPT = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}


@pytest.fixture(scope="module")
def server(default_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    file: Path = tmp_path_factory.mktemp("models") / "models.yaml"
    file.write_text(MODELS)
    flags = ("--models", str(file), "--port", "0", "--kv-memory", "64M", "--max-queue-wait", "600", "--slo-ttft", "5")
    with live_server(*flags) as (url, admin, _):
        yield url, admin


def complete(url: str, model: str) -> str:
    answer = httpx.post(f"{url}/v1/completions", json={"model": model, **PROMPT}, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def replicas(admin: str) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in httpx.get(f"{admin}/v1/replicas", timeout=60).json()["data"]}


def until(true: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < 240, "it did not come true"
        time.sleep(0.2)


def test_models_with_replicas_beside_others(server: tuple[str, str]) -> None:
    url, admin = server
    said = complete(url, "chat")
    assert [complete(url, name) for name in ("alone", "org/other")] == [said, said]
    found = replicas(admin)
    assert sorted(found) == ["alone", "chat:replica-0", "chat:replica-1", "org/other:replica-0"]
    assert [found[id]["model"] for id in sorted(found)] == ["alone", "chat", "chat", "org/other"]
    scaled = httpx.get(f"{admin}/v1/replicas").json()["autoscaling_by_model"]
    assert list(scaled) == ["org/other"] and scaled["org/other"]["target"] == 1

    os.kill(found["chat:replica-0"]["pid"], signal.SIGKILL)
    assert complete(url, "chat") == said, "the other replica answers"
    until(lambda: replicas(admin)["chat:replica-0"]["restarts"] == 1)

    pids = [one["pid"] for id, one in replicas(admin).items() if id.startswith("chat:")]
    assert httpx.post(f"{admin}/models/unload", json={"model": "chat"}, timeout=120).status_code == 200
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert not any(id.startswith("chat:") for id in replicas(admin))
    assert complete(url, "org/other") == said, "one model's replicas end without the others'"
    assert complete(url, "chat") == said, "and are started again when it is asked for"
    assert len([id for id in replicas(admin) if id.startswith("chat:")]) == 2
