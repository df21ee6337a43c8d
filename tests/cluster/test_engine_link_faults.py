"""Engine processes of a real model behind links that fail, with the real timeouts: answers are those of an undisturbed
run, and the processes that were cut off are used again."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
from fault_proxy import FaultProxy
from msgspec.structs import replace
from test_failover import Reader

from quire.cluster.cluster_client import ClusterClient
from quire.cluster.routers import make_router
from quire.engine.client import RestartPolicy
from quire.types.config import EngineOptions
from quire.types.grammar import GrammarSpec
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams


class Processes:
    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, hub: str, member: bytes, options: EngineOptions) -> None:
        command = [sys.executable, "-m", "quire.engine.engine_process", hub, str(os.getpid())]
        process = subprocess.Popen([*command, json.dumps(options.flat())], stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(member)
        process.stdin.close()
        self.started.append(process)

    def stop(self) -> None:
        for process in self.started:
            process.wait(30)


@asynccontextmanager
async def engines(model: str, count: int) -> AsyncIterator[tuple[ClusterClient, list[FaultProxy], Processes]]:
    client = ClusterClient(count, make_router("round-robin", count), RestartPolicy(heartbeat=60.0), connector="tcp")
    options = EngineOptions.of(model=model, kv_memory="64M", max_model_len=512, threads=1)
    processes, proxies = Processes(), []
    async with AsyncExitStack() as stack:
        try:
            for number in range(count):
                proxy = await stack.enter_async_context(FaultProxy(client.hub.address, seed=number))
                proxies.append(proxy)
                member = replace(client.membership, identity=f"engine-{number}", number=number)
                processes.start(proxy.address, msgspec.json.encode(member), options)
            await client.ready(processes)  # type: ignore[arg-type]
            yield client, proxies, processes
        finally:
            for proxy in proxies:
                proxy.heal()
            await client.close()


def requests(turn: str) -> list[Request]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 0.9, "seed": 3, "n": 2, "ignore_eos": True},
        {"temperature": 0.8, "seed": 4, "frequency_penalty": 0.5, "ignore_eos": True},
        {"temperature": 0.0, "grammar": GrammarSpec("json_object")},
    ]
    params = [SamplingParams(max_tokens=96, **kinds[i % 4]) for i in range(8)]
    return [Request(id=f"{turn}{i}", prompt=list(range(100 + i, 140 + i)), params=one) for i, one in enumerate(params)]


async def eventually(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


async def test_an_engine_process_joins_and_stays(default_model) -> None:
    """Whatever it says before it is ready is taken for the word of one that was given up: it would be told to end."""
    async with engines(str(default_model.path), 1) as (client, _, processes):
        done = await asyncio.wait_for(Reader(client, requests("one")[0]).task, 120)
        assert len(done.tokens[0]) == 96 and client._replicas[0].pid == processes.started[0].pid
        assert [(view.state, view.restarts, view.lost) for view in await client.replicas()] == [("ready", 0, "")]


@pytest.mark.slow
async def test_answers_are_those_of_an_undisturbed_run(default_model, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="quire.cluster")
    async with engines(str(default_model.path), 2) as (client, proxies, processes):

        async def answers(turn: str, disturb=None) -> list[tuple[dict, dict]]:
            readers = [Reader(client, request) for request in requests(turn)]
            if disturb is not None:
                await eventually(lambda: all(reader.drawn >= 4 or reader.task.done() for reader in readers))
                await disturb()
            done = [await asyncio.wait_for(reader.task, 240) for reader in readers]
            return [(one.tokens, one.finish) for one in done]

        async def cut_off() -> None:
            proxies[0].partition()
            await eventually(lambda: not client._replicas[0].identity)
            proxies[0].heal()

        async def one_way() -> None:
            proxies[1].to_client.block()
            await eventually(lambda: not client._replicas[1].identity)
            proxies[1].heal()

        async def reset() -> None:
            for proxy in proxies:
                proxy.reset()

        undisturbed = await answers("plain")
        pids = [replica.pid for replica in client._replicas]
        for name, disturb in (("partition", cut_off), ("oneway", one_way), ("reset", reset)):
            assert await answers(name, disturb) == undisturbed
            await eventually(lambda: all(replica.is_ready for replica in client._replicas))
        assert [replica.pid for replica in client._replicas] == pids, "the same processes"
        assert [replica.rejoins for replica in client._replicas] == [2, 2]
        assert await answers("after") == undisturbed
        assert all(process.poll() is None for process in processes.started)
        assert "replica-0 was lost: nothing came from it for" in caplog.text
        assert "replica-0 can be reached again after" in caplog.text
