"""Grammars of all kinds against a live server, a third of them meant to do harm, beside plain streams.

Measured: how much longer the streams wait for a token, whether an outcome depends on what ran before it, and the memory
of the server's processes. Knows: HTTP. Refuses to know: engines.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from quire.bench.schemas import schemas

STREAMS = 8
TOKENS = 24  # of an answer under a grammar
WORDS = ("red", "green", "blue", "north", "south", "open", "closed", "small")
Fields = dict[str, Any]


def grammars(count: int, seed: int = 1) -> list[Fields]:
    """Fields of requests, each with a grammar of its own: two thirds ordinary, a third nasty."""
    rng = random.Random(seed)
    plain = [{"guided_json": schema} for schema in schemas(count // 3, seed)]
    while len(plain) < count - count // 3:
        plain.append(_ordinary(rng, len(plain)))
    found = plain + [_nasty(rng, number) for number in range(count // 3)]
    rng.shuffle(found)
    return found


def _ordinary(rng: random.Random, number: int) -> Fields:
    a, b, n = rng.choice(WORDS), rng.choice(WORDS), rng.randint(1, 9)
    return rng.choice(
        [
            {"guided_regex": rf"{a}-[a-z]{{1,{n}}} {number}"},
            {"guided_regex": rf"({a}|{b}) \d{{{n}}}\.{number}"},
            {"guided_grammar": f'start: "{a}" (" " WORD){{1,{n}}} "{number}"\nWORD: /[a-z]{{1,8}}/'},
            {"guided_grammar": f'root ::= "{a}" (" " word)+ "{number}"\nword ::= [a-z]+ | "{b}"'},
            {"guided_choice": [f"{a} {number}", f"{b} {number}", f"neither {n}"]},
        ]
    )


def _nasty(rng: random.Random, number: int) -> Fields:
    """Slow, ambiguous, huge, or no grammar at all; no two alike."""
    n, many = rng.randint(20, 120), rng.randint(200, 2000)
    text = {"type": "string", "pattern": rf"^$|(^(?:\S+\s+){{0,{n}}}\S+$)", "maxLength": 5000 + number}
    properties = {f"p{i}": {"enum": [i, number]} for i in range(n)}
    return rng.choice(
        [
            {"guided_json": {"type": "object", "properties": {f"q{number}": text}}},
            {"guided_json": {"type": "object", "properties": {f"q{number}": text}, "required": [f"q{number}"]}},
            {"guided_regex": f"the.{{0,{n}}}end{number}"},
            {"guided_regex": f"(a|b)*a(a|b){{{many}}}{number}"},
            {"guided_regex": f"((((a?){{0,{n}}}){{0,{n}}}){{0,{n}}}){number}"},
            {"guided_regex": f"[a-z{number}"},
            {"guided_grammar": f'start: e "{number}"\ne: e e | e e e | "a"'},
            {"guided_grammar": f'start: e\ne: e e | "" | "a{number}"'},
            {"guided_grammar": f"start: A\nA: /.*a.{{{n}}}b/ & /.*b.{{{n}}}a/ & ~/.*{number}.*/"},
            {"guided_grammar": f'root ::= a{number}\nb ::= "x"'},
            {"guided_json": {"anyOf": [{"properties": properties}] * 20}},
            {"guided_json": {"oneOf": [_bounded(number + i) for i in range(9)]}},
            {"guided_json": {"type": "array", "items": {"type": "string", "maxLength": number}, "uniqueItems": True}},
            {"guided_json": {"enum": [f"{number} {i}" for i in range(many)]}},
            {"guided_json": {"$ref": "#/$defs/0", "$defs": _chain(many)}},
            {"guided_json": {"type": "integer", "multipleOf": 999_983 + number}},
        ]
    )


def _bounded(least: int) -> Fields:
    return {"properties": {f"p{i}": {"minimum": least} for i in range(9)}}


def _chain(length: int) -> Fields:
    return {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(length)}


@dataclass
class Storm:
    """What was seen."""

    outcomes: dict[str, str] = field(default_factory=dict)  # by grammar
    gaps: list[float] = field(default_factory=list)  # seconds between chunks of the plain streams
    statuses: dict[int, int] = field(default_factory=dict)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.gaps)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def storm(
    url: str, many: list[Fields], *, streams: int = STREAMS, at_once: int = 2, quiet_s: float = 0.0
) -> Storm:
    """Ask for all, in this order, beside plain streams; without grammars, let the streams run for `quiet_s`."""
    seen = Storm()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        stop = asyncio.Event()
        beside = [asyncio.create_task(_stream(client, model, number, seen, stop)) for number in range(streams)]
        if not many:
            await asyncio.sleep(quiet_s)
        left = list(reversed(many))

        async def ask() -> None:
            while left:
                await _ask(client, model, left.pop(), seen)

        await asyncio.gather(*(ask() for _ in range(at_once)))
        stop.set()
        await asyncio.gather(*beside)
    return seen


async def _ask(client: httpx.AsyncClient, model: str, grammar: Fields, seen: Storm) -> None:
    body = {"model": model, "prompt": "I say:", "max_tokens": TOKENS, "seed": 7, "temperature": 0.8, **grammar}
    answer = await client.post("/v1/completions", json=body)
    seen.statuses[answer.status_code] = seen.statuses.get(answer.status_code, 0) + 1
    if answer.status_code == 200:
        choice = answer.json()["choices"][0]
        outcome = f"{choice['finish_reason']}: {choice['text']}"
    else:
        outcome = f"{answer.status_code}: {answer.json()['error']['message']}"
    seen.outcomes[json.dumps(grammar, sort_keys=True)] = outcome


async def _stream(client: httpx.AsyncClient, model: str, number: int, seen: Storm, stop: asyncio.Event) -> None:
    body = {
        "model": model,
        "prompt": f"Chapter {number}.",
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
        "seed": number,
    }
    while not stop.is_set():
        async with client.stream("POST", "/v1/completions", json=body) as response:
            last = 0.0
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if last:
                        seen.gaps.append(now - last)
                    last = now
                if stop.is_set():
                    return


def resident_mib(pid: int) -> float:
    """Of a process and all that it started."""
    total, left = 0.0, [pid]
    while left:
        pid = left.pop()
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20
            for task in Path(f"/proc/{pid}/task").iterdir():
                left += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return total
