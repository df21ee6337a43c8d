"""How late a server's event loop runs while 100 kB texts are tokenised and large schemas compile.

    quire serve &  python scripts/event_loop_lag.py http://127.0.0.1:8000 [SECONDS]

Reads `quire_event_loop_lag_seconds` from /metrics before and after, so percentiles are upper bounds of its buckets.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections import Counter

import httpx

SENTENCE = "The quick brown fox jumps over the lazy dog near river number {}. "
BUCKET = re.compile(r'quire_event_loop_lag_seconds_bucket\{[^}]*le="([^"]+)"[^}]*\} (\S+)')


async def buckets(client: httpx.AsyncClient) -> list[tuple[float, float]]:
    found = BUCKET.findall((await client.get("/metrics")).text)
    return [(float(bound.replace("+Inf", "inf")), float(count)) for bound, count in found]


async def tokenise(client: httpx.AsyncClient, model: str, number: int, until: float, done: Counter[str]) -> None:
    """Texts of 100 kB, no two alike."""
    while time.monotonic() < until:
        first = 10_000_000 * number + 2000 * done["texts"]
        text = "".join(SENTENCE.format(first + i) for i in range(1600))[:100_000]
        (await client.post("/tokenize", json={"model": model, "prompt": text})).raise_for_status()
        done["texts"] += 1


async def compile_schemas(client: httpx.AsyncClient, model: str, until: float, done: Counter[str]) -> None:
    """Schemas of 300 enumerations of 20 values, no two alike."""
    choices = {f"x{i}": {"enum": [f"v{j}" for j in range(20)]} for i in range(5)}
    while time.monotonic() < until:
        fields = {f"f{done['schemas']}_{i}": {"type": "object", "properties": choices} for i in range(60)}
        body = {"model": model, "prompt": "x", "max_tokens": 1, "guided_json": {"type": "object", "properties": fields}}
        (await client.post("/v1/completions", json=body)).raise_for_status()
        done["schemas"] += 1


async def main(url: str, seconds: float) -> None:
    done: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        before, until = await buckets(client), time.monotonic() + seconds
        clients = [tokenise(client, model, number, until, done) for number in range(2)]
        await asyncio.gather(*clients, compile_schemas(client, model, until, done))
        after = await buckets(client)
    counts = [(bound, late - early) for (bound, late), (_, early) in zip(after, before, strict=True)]
    total = counts[-1][1]
    for share in (0.5, 0.9, 0.99, 0.999):
        bound = next(bound for bound, count in counts if count >= share * total)
        print(f"p{100 * share:g} at most {1e3 * bound:g} ms")
    print(f"{total:.0f} samples in {seconds:.0f} s, {done['texts']} texts, {done['schemas']} schemas")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 30.0))
