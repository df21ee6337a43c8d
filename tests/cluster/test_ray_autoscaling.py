"""Autoscaling on a Ray of the server's own: one replica, none, one by a request, two by load, none."""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from live_server import MODEL, live_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FLAGS = (
    "--replicas 1 --min-replicas 0 --max-replicas 2 --max-seqs 4 --downscale-delay 5 --upscale-delay 1 "
    "--target-queue-delay 0.5 --port 0 --kv-memory 512M --log-level warning"
)


class Server(NamedTuple):
    url: str
    admin: str
    process: subprocess.Popen[str]

    def states(self) -> list[str]:
        return [one["state"] for one in httpx.get(f"{self.admin}/v1/replicas").json()["data"]]

    def until(self, *states: str) -> float:
        """Seconds until replicas are in these states."""
        began = time.monotonic()
        while time.monotonic() - began < 180:
            if (found := self.states()) == list(states):
                return time.monotonic() - began
            time.sleep(0.1)
        raise AssertionError(found)


@pytest.fixture(scope="module")
def server(default_model: Any) -> Iterator[Server]:
    with live_server(*FLAGS.split()) as started:
        yield Server(*started)


async def answers(server: Server, count: int, tokens: int) -> tuple[list[str], float]:
    """Greedy answers, and when the first token of any came."""
    first: list[float] = []

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        body = {"model": MODEL, "prompt": f"{number} is", "max_tokens": tokens, "temperature": 0, "stream": True,
                "ignore_eos": True}  # fmt: skip
        text = ""
        async with client.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    first.append(time.monotonic())
                    text += httpx.Response(200, content=line[6:]).json()["choices"][0]["text"]
        return text

    began = time.monotonic()
    async with httpx.AsyncClient(timeout=300) as client:
        found = await asyncio.gather(*(ask(client, number % 4) for number in range(count)))
    return found, min(first) - began


def test_one_none_one_two_none(server: Server) -> None:
    before, warm = asyncio.run(answers(server, 4, 24))
    print(f"first token while there is a replica: {warm:.2f} s")
    print(f"one to none: {server.until():.1f} s, 5 of them idle")
    assert httpx.get(f"{server.url}/ready").status_code == 200, "a request would be served"
    assert httpx.get(f"{server.url}/v1/models").status_code == 200
    cold, waited = asyncio.run(answers(server, 4, 24))
    print(f"none to one: first token after {waited:.1f} s")
    assert cold == before

    async def busy() -> list[str]:
        """More at once than one runs, until there are two."""
        texts, deadline = [], time.monotonic() + 240
        while server.states() != ["ready", "ready"]:
            assert time.monotonic() < deadline, "no second replica"
            texts += (await answers(server, 12, 24))[0]
        return texts

    began = time.monotonic()
    texts = asyncio.run(busy())
    print(f"one to two, and {len(texts)} answers: {time.monotonic() - began:.1f} s")
    assert texts == before * (len(texts) // 4), "no request is lost or changed"
    scaling = httpx.get(f"{server.admin}/v1/replicas").json()["autoscaling"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (0, 2)
    print(f"two to none: {server.until():.1f} s")
    metrics = httpx.get(f"{server.admin}/metrics").text
    for direction, least in (("up", 2), ("down", 2)):
        found = re.findall(rf'^quire_autoscaler_scalings_total\{{direction="{direction}"\}} (\S+)', metrics, re.M)
        assert float(found[0]) >= least
    assert "quire_autoscaler_replicas_wanted 0.0" in metrics
    assert "quire_failovers_total 0.0" in metrics
