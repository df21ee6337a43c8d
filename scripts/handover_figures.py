"""What handing KV pages over costs and gains on this machine: `python scripts/handover_figures.py [handover] [decode]
[migration] [rebalancing]`, all four unless told.

Engine processes of the default model, without Ray. `handover`: bytes and seconds of one, and how much of it is hidden
behind computing. `decode`: inter-token latency of streams beside long prompts that come at fixed times, for one engine
with all cores and each of some step targets, and for one prefill and one decode replica with half of them each, in
turns. `migration`: the pause of running requests that move, with their pages and without. `rebalancing`: all requests
begin on one of two replicas, and may move or not.
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
from contextlib import AsyncExitStack, asynccontextmanager
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

OPTIONS: dict[str, Any] = {}  # of the engines, by the command line
PARTS = ("handover", "decode", "migration", "rebalancing")
CONNECTORS = ("shared-memory", "tcp", *(("nixl",) if find_spec("nixl") is not None else ()))


class Host:
    def __init__(self, processes: list[subprocess.Popen[bytes]]):
        self._processes = processes

    def stop(self) -> None:
        for process in self._processes:
            process.wait(30)


@asynccontextmanager
async def cluster(
    count: int, threads: int, *, prefill: int = 0, connector: str = "tcp", rebalance: bool = False, **options: Any
) -> AsyncIterator[ClusterClient]:
    policy = RestartPolicy(heartbeat=60.0)
    client = ClusterClient(
        count, make_router("least-load", count), policy,
        prefill=prefill, connector=connector, handover_timeout=60.0, rebalance=rebalance,
    )  # fmt: skip
    said = {"kv_memory": "384M", "max_model_len": 8192, "threads": threads, "max_seqs": 64} | OPTIONS | options
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

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

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


class Interference:
    """Streams of one way to serve them while long prompts come, in rounds: gaps between tokens that ended within the
    same time of each round, and how long the prompts waited for their first token."""

    def __init__(self, name: str, client: ClusterClient):
        self.name, self._client = name, client
        self.gaps: list[list[float]] = []  # by round
        self.waits: list[float] = []
        self.seconds = 0.0
        self._before = 0  # prompts that were computed elsewhere

    async def forget(self) -> None:
        self.gaps, self.waits, self.seconds = [], [], 0.0
        self._before = (await received(self._client)).remote_prefills

    async def round(self, number: int, streams: int, long: int, prompts: int, every: float) -> None:
        """The same requests for all ways, at the same times."""
        client, most = self._client, 4096
        running = [Stream(client, f"s{number}-{i}", ids(64, number * 100 + i), most, seed=i) for i in range(streams)]
        await until(lambda: all(len(one.times) > 1 for one in running))
        began, asked = time.perf_counter(), []
        for index in range(prompts):
            asked.append(Stream(client, f"long{number}-{index}", ids(long, 1000 + number * 100 + index), 1))
            await asyncio.sleep(began + (index + 1) * every - time.perf_counter())
        end = time.perf_counter()
        self.seconds += end - began
        pairs = [pair for one in running for pair in zip(one.times, one.times[1:], strict=False)]
        cut_short = [end - one.times[-1] for one in running]  # counted, for it may be the longest
        self.gaps.append([after - before for before, after in pairs if after > began] + cut_short)
        await asyncio.gather(*(one.task for one in asked))
        self.waits += [one.ttft for one in asked]
        for one in running:
            await one.stop()

    async def report(self) -> str:
        every = [gap for gaps in self.gaps for gap in gaps]
        p99s = sorted(at(gaps, 0.99) for gaps in self.gaps)
        elsewhere = (await received(self._client)).remote_prefills - self._before
        return (
            f"{self.name}: ITL p50 {median(every) * 1e3:.0f} ms, p99 {median(p99s) * 1e3:.0f} ms "
            f"({p99s[0] * 1e3:.0f} to {p99s[-1] * 1e3:.0f}), most {max(every) * 1e3:.0f} ms; TTFT of prompts p50 "
            f"{median(self.waits):.2f} s, most {max(self.waits):.2f} s; {len(every) / self.seconds:.0f} tokens/s; "
            f"{elsewhere} of {len(self.waits)} prompts prefilled elsewhere"
        )


async def decode(asked: argparse.Namespace) -> None:
    """Streams that draw tokens while long prompts come, whatever becomes of the ones before. All engines are started
    first, and take turns in every round, so that what else the machine does is the same for all."""
    cores, half = asked.cores, max(1, asked.cores // 2)
    ways: list[tuple[str, dict[str, Any]]] = [
        (f"one engine, {cores} thread(s), step target {one:g} s", {"count": 1, "threads": cores, "step_target": one})
        for one in asked.targets
    ]
    ways.append((f"1 prefill + 1 decode, {half} thread(s) each", {"count": 2, "threads": half, "prefill": 1}))
    async with AsyncExitStack() as stack:
        measured = []
        for name, settings in ways:
            client = await stack.enter_async_context(cluster(connector=asked.connector, **settings))
            measured.append(Interference(name, client))
        for number in range(-1, asked.rounds):
            for one in Random(number).sample(measured, len(measured)):
                await one.round(number + 1, asked.streams, asked.long, asked.prompts, asked.every)
                if number < 0:  # in which costs are learned and memory is touched
                    await one.forget()
        print(
            f"{asked.prompts} prompts of {asked.long} tokens, one in {asked.every:g} s, beside {asked.streams} streams"
        )
        for one in measured:
            print(await one.report(), flush=True)


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


async def rebalancing(threads: int, streams: int, tokens: int) -> None:
    """All requests begin on one replica; then there is a second."""
    for on in (False, True):
        async with cluster(2, threads, connector="shared-memory", rebalance=on) as client:
            client._replicas[1].routable = False
            running = [Stream(client, f"s{i}", ids(100, i), tokens, seed=i) for i in range(streams)]
            await until(lambda running=running: all(len(one.times) >= 4 for one in running))
            client._replicas[1].routable, began = True, time.perf_counter()
            await asyncio.gather(*(one.task for one in running))
            took = time.perf_counter() - began
            assert all(len(one.tokens) == tokens for one in running)
            pairs = [pair for one in running for pair in zip(one.times, one.times[1:], strict=False)]
            gaps = [after - before for before, after in pairs if after > began]
            print(
                f"rebalancing {'on' if on else 'off'}: {client.migration.migrations} of {streams} requests moved; all "
                f"ended after {took:.1f} s, {len(gaps) / took:.0f} tokens/s; ITL p50 {median(gaps):.2f} s, p99 "
                f"{at(gaps, 0.99):.2f} s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=PARTS)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--long", type=int, default=1600)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--turns", type=int, default=5, help="of handover")
    parser.add_argument("--rounds", type=int, default=3, help="of decode, behind one to warm up")
    parser.add_argument("--prompts", type=int, default=3, help="of each round of decode")
    parser.add_argument("--every", type=float, default=6.0, help="seconds between them")
    parser.add_argument(
        "--targets", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.3], help="step targets of decode"
    )
    parser.add_argument("--connector", default="shared-memory", choices=CONNECTORS, help="of decode")
    parser.add_argument("--moved", type=int, default=50)
    parser.add_argument("--options", type=json.loads, default={}, help="other options of the engines, as JSON")
    asked = parser.parse_args()
    if unknown := [part for part in asked.what if part not in PARTS]:
        parser.error(f"it measures {', '.join(PARTS)}, not {unknown[0]!r}")
    if not isinstance(asked.options, dict):
        parser.error("--options is an object of JSON")
    OPTIONS.update(asked.options)
    half = max(1, asked.cores // 2)
    if "handover" in asked.what:
        asyncio.run(handover(half, asked.long, asked.turns))
    if "decode" in asked.what:
        asyncio.run(decode(asked))
    if "migration" in asked.what:
        asyncio.run(migration(half, asked.moved, asked.tokens))
    if "rebalancing" in asked.what:
        asyncio.run(rebalancing(half, asked.moved, asked.tokens))


if __name__ == "__main__":
    main()
