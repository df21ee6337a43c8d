"""Policies beside each other on a real server: what docs/scheduling.md says of the simulator, checked live.

tenants   two keys, one of which sends ten times as much, together more than the server can do: fcfs against fair
chat, mix two cells of the table, at a load of what the server can do: fcfs against auto

python scripts/live_policies.py --json found.json                 # all three, about half an hour on two quiet cores
python scripts/live_policies.py --only tenants --num 60 --max-seqs 8

What is not known here goes to `quire serve`. Lengths are those of the simulator's workloads, up to `--longest`, and
targets theirs, `--slow` times as long: a CPU is no H200.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from quire.bench.load.http import Answer, Pool
from quire.simulation.synthetic import arrivals, synthetic
from quire.simulation.traces import Arrival

TENANTS = ("small", "large")
TIMES_AS_MUCH = 10  # what the large tenant sends
OVERLOAD = 1.4  # of both together
VOCAB = (1000, 32_000)
TARGETS = {
    "chat": (0.5, 0.05),
    "mix": (0.5, 0.05),
    "tenants": (0.0, 0.0),
}  # seconds, where a request has none of its own
KINDS = {"chat": "poisson", "mix": "gamma:0.3", "tenants": "poisson"}
PORT_WAIT = 120.0  # seconds for the server to start


class Done(NamedTuple):
    tenant: str
    due: float
    prompt: int
    targets: tuple[float, float]
    answer: Answer
    began: float

    @property
    def ttft(self) -> float:
        return self.answer.times[0] - self.began - self.due

    @property
    def good(self) -> bool:
        """Whether it met its targets; 0: none."""
        times, tokens, (ttft, tpot) = self.answer.times, self.answer.tokens, self.targets
        pace = (times[-1] - times[0]) / (tokens - 1) if tokens > 1 else 0.0
        return not (0 < ttft < self.ttft or 0 < tpot < pace)


def key_of(tenant: str) -> str:
    return f"the-key-of-the-tenant-{tenant}"


def traffic(name: str, num: int, seed: int, known: argparse.Namespace) -> list[Arrival]:
    """What is asked, moments left out."""
    made = synthetic("mix" if name == "mix" else "chat", num, 1.0, seed)
    found = []
    for number, one in enumerate(made):
        ttft, tpot = (one.ttft, one.tpot) if one.ttft else TARGETS[name]
        found.append(
            one._replace(
                prompt=min(one.prompt, known.longest),
                outputs=min(one.outputs, known.longest_answer),
                ttft=known.slow * ttft,
                tpot=known.slow * tpot,
                tenant=TENANTS[number % (TIMES_AS_MUCH + 1) > 0] if name == "tenants" else TENANTS[0],
            )
        )
    return found


@contextmanager
def server(policy: str, arguments: Sequence[str]) -> Iterator[str]:
    """Its address, once it is up."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        keys = Path(folder) / "keys.toml"
        keys.write_text("".join(f'[[key]]\nname = "{tenant}"\nkey = "{key_of(tenant)}"\n' for tenant in TENANTS))
        keys.chmod(0o600)
        free.close()
        command = [sys.executable, "-m", "quire", "serve", "--port", str(port), "--admin-port", "0", "--no-cache-salt"]
        command += ["--api-keys", str(keys), "--scheduler", policy, *arguments]
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until = time.monotonic() + PORT_WAIT
            while True:
                if running.poll() is not None or time.monotonic() > until:
                    raise SystemExit("the server did not start")
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            running.terminate()
            running.wait()


async def load(url: str, asked: Sequence[Arrival], seed: int) -> list[Done]:
    """Sends what is asked when it is due, whatever the server does."""
    pools = {tenant: Pool(url, api_key=key_of(tenant), limit=4096) for tenant in TENANTS}
    rng = Random(seed)

    def request(one: Arrival) -> bytes:
        body: dict[str, Any] = {
            "prompt": [rng.randrange(*VOCAB) for _ in range(one.prompt)],
            "max_tokens": one.outputs,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
        }
        if one.ttft:
            body["slo"] = {"ttft": one.ttft, "tpot": one.tpot}
        return pools[one.tenant].request("/v1/completions", json.dumps(body).encode())

    ready = [(one, request(one)) for one in asked]
    warm = await pools[TENANTS[0]].send(request(asked[0]._replace(prompt=64, outputs=8)), 600)
    if warm.status != 200:
        raise SystemExit(f"HTTP {warm.status} {warm.error or warm.body.decode()[:500]}")
    began, tasks = time.perf_counter(), []
    for one, data in ready:
        if (wait := began + one.at - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(pools[one.tenant].send(data, 3600)))
    answers = await asyncio.gather(*tasks)
    for pool in pools.values():
        pool.close()
    if bad := [answer for answer in answers if answer.status != 200 or not answer.times]:
        raise SystemExit(f"{len(bad)} failed: HTTP {bad[0].status} {bad[0].error or bad[0].body.decode()[:500]}")
    rows = zip(asked, answers, strict=True)
    return [Done(one.tenant, one.at, one.prompt, (one.ttft, one.tpot), answer, began) for one, answer in rows]


def capacity(found: Sequence[Done]) -> float:
    """Requests per second in the middle half of those that were all sent at once."""
    ends = sorted(one.answer.end for one in found)
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (last - first) / (ends[last] - ends[first])


def figures(found: Sequence[Done]) -> dict[str, Any]:
    began = found[0].began
    seconds = max(one.answer.end for one in found) - began
    last = max(one.due for one in found)  # until then both tenants have work that waits

    def spread(values: Sequence[float]) -> dict[str, float]:
        return {f"p{p}": round(float(np.percentile(values, p)), 3) for p in (50, 99)}

    def served(own: Sequence[Done]) -> float:
        """Tokens in the time in which requests came: of prompts, once they are computed, and of answers."""
        times = [(one, [t for t in one.answer.times if t - began <= last]) for one in own]
        return sum((one.prompt if seen else 0) + len(seen) for one, seen in times)

    tenants = {}
    for tenant in dict.fromkeys(one.tenant for one in found):
        own = [one for one in found if one.tenant == tenant]
        share = served(own) / max(served(found), 1)
        tenants[tenant] = {"requests": len(own), "ttft_s": spread([o.ttft for o in own]), "token_share": share}
    return {
        "requests": len(found),
        "seconds": seconds,
        "goodput_rps": sum(one.good for one in found) / seconds,
        "output_tok_s": sum(one.answer.tokens for one in found) / seconds,
        "ttft_s": spread([one.ttft for one in found]),
        "ttlt_s": spread([one.answer.end - one.began - one.due for one in found]),
        "tenants": tenants,
    }


def compare(name: str, policies: Sequence[str], known: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """One workload under one policy after another, at the same moments."""
    asked = traffic(name, known.num, known.seed, known)
    with server("fcfs", arguments) as url:
        at_once = [one._replace(at=0.0) for one in traffic(name, max(16, known.num // 2), known.seed + 1, known)]
        able = capacity(asyncio.run(load(url, at_once, known.seed + 1)))
    rate = able * (OVERLOAD if name == "tenants" else known.load)
    moments = arrivals(KINDS[name], rate, known.seed)
    asked = [one._replace(at=next(moments)) for one in asked]
    found: dict[str, Any] = {"capacity_rps": able, "rate": rate}
    print(f"{name}: {able:.2f} requests a second at once, {rate:.2f} offered", flush=True)
    for policy in policies:
        with server(policy, arguments) as url:
            found[policy] = figures(asyncio.run(load(url, asked, known.seed)))
        print(f"{name} {policy}", json.dumps(found[policy]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("tenants", "chat", "mix"))
    parser.add_argument("--num", type=int, default=330, help="requests of a run")
    parser.add_argument("--load", type=float, default=1.1, help="of capacity, in chat and mix")
    parser.add_argument("--slow", type=float, default=4.0, help="times the targets that the simulator has")
    parser.add_argument("--longest", type=int, default=4000, help="tokens of a prompt")
    parser.add_argument("--longest-answer", type=int, default=400, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-seqs", type=int, default=16)
    parser.add_argument("--json", type=Path)
    known, rest = parser.parse_known_args()
    arguments = ["--max-seqs", str(known.max_seqs), *rest]
    found = {}
    for name, policies in (("tenants", ("fcfs", "fair")), ("chat", ("fcfs", "auto")), ("mix", ("fcfs", "auto"))):
        if known.only in (None, name):
            found[name] = compare(name, policies, known, arguments)
    if known.json:
        known.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
