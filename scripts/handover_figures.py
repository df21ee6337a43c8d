"""What handing KV pages over costs and gains on this machine: `python scripts/handover_figures.py [handover] [decode]
[migration]`, all three unless told.

Engine processes of the default model, without Ray. `handover`: bytes and seconds of one, and how much of it is hidden
behind computing. `decode`: inter-token latency of streams beside long prompts, for one engine with all cores and some
step targets, and for one prefill and one decode replica with half of them each. `migration`: the pause of running
requests that move, with their pages and without. `--long`, `--streams` and `--tokens` scale the load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from random import Random
from statistics import median
from typing import Any

import msgspec
from msgspec.structs import replace

from quire.cluster.cluster_client import ClusterClient
from quire.cluster.roles import PrefillCosts
from quire.cluster.routers import make_router
from quire.engine.client import RestartPolicy
from quire.types.config import EngineOptions
from quire.types.handover import HandoverStats
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

CONNECTORS = ("shared-memory", "tcp", *(("nixl",) if find_spec("nixl") is not None else ()))


class Host:
    def __init__(self, processes: list[subprocess.Popen[bytes]]):
        self._processes = processes

    def stop(self) -> None:
        for process in self._processes:
            process.wait(30)


@asynccontextmanager
async def cluster(
    count: int, threads: int, *, prefill: int = 0, connector: str = "tcp", **options: Any
) -> AsyncIterator[ClusterClient]:
    policy = RestartPolicy(heartbeat=60.0)
    client = ClusterClient(
        count, make_router("least-load", count), policy, prefill=prefill, connector=connector, handover_timeout=60.0
    )
    said = {"kv_memory": "384M", "max_model_len": 8192, "threads": threads, "max_seqs": 64} | options
    engine = json.dumps(EngineOptions.of(**said).flat())
    processes = []
    for number in range(count):
        command = [sys.executable, "-m", "quire.engine.engine_process", client.hub.address, str(os.getpid()), engine]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(replace(client.membership, identity=f"engine-{number}")))
        process.stdin.close()
        processes.append(process)
    try:
        await client.ready(Host(processes))
        yield client
    finally:
        await client.close()


class Stream:
    """One request, and when its tokens came."""

    def __init__(self, client: ClusterClient, name: str, prompt: list[int], tokens: int, seed: int = 0):
        params = SamplingParams(temperature=0.8, seed=seed, max_tokens=tokens, ignore_eos=True)
        self.name, self.began = name, time.perf_counter()
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.events = client.submit(Request(id=name, prompt=prompt, params=params))
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for batch in self.events:
            for event in batch:
                assert event.index == len(self.tokens), "a token twice, or one missing"
                self.tokens += event.tokens
                self.times += [time.perf_counter()] * len(event.tokens)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.began

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def ids(count: int, seed: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(count)]


def at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def handover(threads: int, long: int, turns: int) -> None:
    """Of one prompt: computed elsewhere, on a prefix hit, and its pages alone."""
    PrefillCosts.should_prefill_remotely = lambda *_: True  # type: ignore[method-assign,assignment]
    for connector in CONNECTORS:
        async with cluster(2, threads, prefill=1, connector=connector) as client:
            costs, exposed, hits, first, alone = client.handovers.costs, [], [], [], []
            for turn in range(turns):
                prompt = ids(long, seed=100 + turn)
                costs.handover_latency_s = 0.0  # of this one, not an average
                for times, name in ((first, "first"), (hits, "hit")):
                    stream = Stream(client, f"{name}-{turn}", prompt, 2)
                    await stream.task
                    times.append(stream.ttft)
                    if times is first:
                        exposed.append(costs.handover_latency_s)
            done = await received(client)
            size = done.bytes_received / done.completed
            for turn in range(turns):  # computed before anybody asks: there is nothing to hide behind
                prompt = ids(long, seed=200 + turn)
                computed = asyncio.get_running_loop().create_future()
                one = Request(id=f"early-{turn}", prompt=prompt, params=SamplingParams())
                client.handovers.send(client._replicas[0], one, prompt, None, 0, computed.set_result)
                await computed
                before = (await received(client)).seconds
                await Stream(client, f"late-{turn}", prompt, 2).task
                alone.append((await received(client)).seconds - before)
            shown, whole = max(0.0, median(exposed) - median(hits)), median(alone)
            print(
                f"{connector}: {long} tokens, {size / 1e6:.1f} MB; first token after {median(first):.2f} s, of which "
                f"{median(exposed):.2f} s after the prefill's end (on a prefix hit: {median(hits):.2f} s); pages alone "
                f"{whole:.2f} s, {size / whole / 1e6:.0f} MB/s; hidden: {1 - min(1.0, shown / whole):.0%}",
                flush=True,
            )


async def received(client: ClusterClient) -> HandoverStats:
    found = (await client.stats()).handovers
    assert found is not None
    return found


async def decode(cores: int, long: int, streams: int, tokens: int) -> None:
    """Streams that draw tokens while long prompts come one after the other."""
    ways: list[tuple[str, dict[str, Any]]] = [
        (
            f"one engine, {cores} threads, step target {target:g} s",
            {"count": 1, "threads": cores, "step_target": target},
        )
        for target in (0.05, 0.1, 0.3)
    ]
    half = max(1, cores // 2)
    ways.append((f"1 prefill + 1 decode, {half} thread(s) each", {"count": 2, "threads": half, "prefill": 1}))
    for name, settings in ways:
        async with cluster(connector="shared-memory", **settings) as client:
            running = [Stream(client, f"s{i}", ids(64, i), tokens, seed=i) for i in range(streams)]
            await until(lambda running=running: all(one.times for one in running))
            waits, number = [], 0
            while not all(one.task.done() for one in running):
                prompt = Stream(client, f"long-{number}", ids(long, 1000 + number), 1)
                await prompt.task
                waits.append(prompt.ttft)
                number += 1
            gaps = [gap for one in running for gap in one.gaps]
            took = max(one.times[-1] for one in running) - min(one.times[0] for one in running)
            stats = (await client.stats()).handovers
            print(
                f"{name}: ITL p50 {median(gaps) * 1e3:.0f} ms, p99 {at(gaps, 0.99) * 1e3:.0f} ms, most "
                f"{max(gaps) * 1e3:.0f} ms; {number} prompts of {long} tokens, TTFT {median(waits):.2f} s; "
                f"{streams * tokens / took:.0f} tokens/s; prefilled elsewhere: {stats and stats.remote_prefills}",
                flush=True,
            )


async def migration(threads: int, streams: int, tokens: int) -> None:
    """All requests of one replica move to another while they are read."""
    for connector in (*CONNECTORS, ""):
        async with cluster(2, threads, connector=connector) as client:
            client._replicas[1].routable = False
            running = [Stream(client, f"s{i}", ids(100, i), tokens, seed=i) for i in range(streams)]
            await until(lambda running=running: all(len(one.times) >= 4 for one in running))
            client._replicas[1].routable = True
            moved: dict[str, float] = {}
            resumed = client._move

            def told(parts: Any, moved: dict[str, float] = moved, resumed: Any = resumed, **how: Any) -> None:
                moved.update({part.active.request.id: time.perf_counter() for part in parts})
                resumed(parts, **how)

            client._move = told  # type: ignore[method-assign]
            began = time.perf_counter()
            await client.drain("replica-0", 0.0)
            took = time.perf_counter() - began
            await asyncio.gather(*(one.task for one in running))
            assert all(len(one.tokens) == tokens for one in running)
            pauses = []
            for one in running:
                if one.name in moved and one.times[-1] > moved[one.name]:
                    before = max(when for when in one.times if when <= moved[one.name])
                    pauses.append(min(when for when in one.times if when > moved[one.name]) - before)
            usual = [gap for one in running for gap in one.gaps]
            stats = (await client.stats()).handovers
            sent = (stats.bytes_received if stats else 0) / 1e6
            print(
                f"{connector or 'computed again'}: {len(pauses)} of {streams} requests moved within {took:.1f} s, "
                f"{client.migration.migrations} with pages, {sent:.0f} MB; pause "
                f"p50 {median(pauses):.2f} s, p99 {at(pauses, 0.99):.2f} s; usual ITL {median(usual):.2f} s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["handover", "decode", "migration"])
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--long", type=int, default=1600)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--moved", type=int, default=50)
    asked = parser.parse_args()
    half = max(1, asked.cores // 2)
    if "handover" in asked.what:
        asyncio.run(handover(half, asked.long, asked.turns))
    if "decode" in asked.what:
        asyncio.run(decode(asked.cores, asked.long, asked.streams, asked.tokens))
    if "migration" in asked.what:
        asyncio.run(migration(half, asked.moved, asked.tokens))


if __name__ == "__main__":
    main()
