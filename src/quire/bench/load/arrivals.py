"""What is asked and when: calls with their due times, from a rate or from a recorded trace.

Refuses to know: HTTP, clocks.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from quire.bench.workloads import Job
from quire.types.errors import ConfigError

TRACE_BLOCK = 512  # tokens named by one entry of a trace's hash_ids


class Call(NamedTuple):
    due: float  # seconds after the run begins
    job: Job


def at_rate(jobs: Iterable[Job], rate: float, burstiness: float, seed: int) -> list[Call]:
    """Independent arrivals at a mean `rate` per second. Gaps are gamma distributed with shape `burstiness`:
    1 is a Poisson process, less comes in bursts, more is steadier."""
    if not (rate > 0 and burstiness > 0):
        raise ConfigError(f"rate and burstiness must be positive, got {rate:g} and {burstiness:g}")
    rng = Random(seed)
    now = 0.0
    calls = []
    for job in jobs:
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        calls.append(Call(now, job))
    return calls


def read_trace(path: Path, *, limit: int, speed: float, seed: int, vocab: int) -> list[Call]:
    """A recorded trace, replayed `speed` times as fast. JSON lines have timestamp (ms), input_length, output_length
    and maybe hash_ids (equal ids: equal blocks of 512 tokens); CSV has TIMESTAMP, ContextTokens, GeneratedTokens."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = _csv_rows(file) if path.suffix.lower() == ".csv" else map(_json_row, filter(str.strip, file))
            picked = [row for row, _ in zip(rows, range(limit), strict=False)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {type(error).__name__}: {error}") from None
    if not picked:
        raise ConfigError(f"the trace {path} is empty")
    start = min(row[0] for row in picked)
    calls = [
        Call((at - start) / speed, Job(_prompt(length, ids, Random(f"{seed}/{i}"), vocab), max(1, out)))
        for i, (at, length, out, ids) in enumerate(picked)
    ]
    return sorted(calls, key=lambda call: call.due)


_Row = tuple[float, int, int, list[int]]


def _json_row(line: str) -> _Row:
    row: dict[str, Any] = json.loads(line)
    return row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), row.get("hash_ids") or []


def _csv_rows(file: Iterable[str]) -> Iterator[_Row]:
    for row in csv.DictReader(file):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        yield at, int(row["ContextTokens"]), int(row["GeneratedTokens"]), []


def _prompt(length: int, ids: list[int], rng: Random, vocab: int) -> list[int]:
    low = min(1000, vocab // 2)
    tokens: list[int] = []
    for block in ids:
        if len(tokens) + TRACE_BLOCK <= length:
            named = Random(block)
            tokens += [named.randrange(low, vocab) for _ in range(TRACE_BLOCK)]
    return tokens + [rng.randrange(low, vocab) for _ in range(max(1, length) - len(tokens))]
