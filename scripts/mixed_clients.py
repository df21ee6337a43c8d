"""Twelve clients with prompts of 5 to 6,000 tokens against a real server, one request at a time each, under one policy
after another: time to first token of short prompts, throughput, and how far predicted waits were off.

python scripts/mixed_clients.py --policies fcfs,auto --num 100 --json found.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx

CLIENTS = 12
SHORT = 300  # tokens
VOCAB = 32_000


def work(num: int, seed: int) -> list[tuple[list[int], int]]:
    """(prompt, output tokens): log-uniform, 5 to 6,000; uniform, 8 to 64."""
    rng = Random(seed)
    sizes = [round(math.exp(rng.uniform(math.log(5), math.log(6000)))) for _ in range(num)]
    return [([rng.randrange(1000, VOCAB) for _ in range(size)], rng.randrange(8, 65)) for size in sizes]


async def ask(client: httpx.AsyncClient, prompt: list[int], tokens: int) -> tuple[int, float, float]:
    """(prompt tokens, seconds to the first token, to the last)."""
    began, first = time.perf_counter(), 0.0
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.is_error:
            raise SystemExit((await reply.aread()).decode())
        async for line in reply.aiter_lines():
            if line.startswith("data: {") and not first:
                first = time.perf_counter()
    return len(prompt), first - began, time.perf_counter() - began


async def load(url: str, jobs: list[tuple[list[int], int]]) -> tuple[list[tuple[int, float, float]], float, str]:
    queue, found = iter(jobs), []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await ask(client, list(range(1000, 1200)), 8)  # what is slow only once

        async def one() -> None:
            for prompt, tokens in queue:
                found.append(await ask(client, prompt, tokens))

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(CLIENTS)))
        return found, time.perf_counter() - began, (await client.get("/metrics")).text


def summary(found: list[tuple[int, float, float]], seconds: float, metrics: str, tokens: int) -> dict[str, Any]:
    short = sorted(ttft for size, ttft, _ in found if size < SHORT)
    long = sorted(ttft for size, ttft, _ in found if size >= SHORT)
    pattern = r'quire_admission_wait_ratio_bucket\{.*le="([^"]+)".*\} (\S+)'
    ratios = {bound: float(count) for bound, count in re.findall(pattern, metrics)}
    known = ratios.get("+Inf", 0.0)
    return {
        "requests": len(found),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "short": {"count": len(short), "p50": median(short), "p90": short[int(0.9 * len(short))], "most": short[-1]},
        "long": {"count": len(long), "p50": median(long), "most": long[-1]},
        "predicted_within_2": (ratios["2.0"] - ratios["0.5"]) / known if known else None,
        "wait_ratios": ratios,
    }


def run(policy: str, jobs: list[tuple[list[int], int]], arguments: list[str]) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "quire", "serve", "--port", str(port), "--admin-port", "0", "--scheduler", policy]
    server = subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if server.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.2)
        found, seconds, metrics = asyncio.run(load(url, jobs))
    finally:
        server.terminate()
        server.wait()
    return summary(found, seconds, metrics, sum(len(prompt) + tokens for prompt, tokens in jobs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="fcfs,auto")
    parser.add_argument("--num", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    known, rest = parser.parse_known_args()
    jobs = work(known.num, known.seed)
    found = {}
    for policy in known.policies.split(","):
        found[policy] = run(policy, jobs, rest)
        print(policy, json.dumps(found[policy]), flush=True)
    if known.json:
        known.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
