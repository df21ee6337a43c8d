"""What is asked of simulated replicas, and when: traces as JSON lines or CSV.

Names of the public traces are known as they are: `arrival_s, input_tokens, output_tokens, blocks_512`; Azure's
`TIMESTAMP, ContextTokens, GeneratedTokens`; Mooncake's `timestamp` (ms), `input_length, output_length, hash_ids`.
Beside them a trace may say `tenant`, `ttft_s` and `tpot_s` (its targets), `background`. Equal block ids are equal
prefixes. Lines of the server's own log (`--log-format json`) are read too.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from quire.types.errors import ConfigError

TRACE_BLOCK = 512  # tokens named by one block id, where the trace does not say


class Arrival(NamedTuple):
    """One request of a trace."""

    at: float  # seconds
    prompt: int  # tokens
    outputs: int
    blocks: tuple[int, ...] = ()  # ids of the prompt's blocks: equal ids are equal prefixes
    block: int = TRACE_BLOCK  # tokens of a block
    tenant: str = ""
    ttft: float = 0.0  # targets in seconds; 0: none of its own
    tpot: float = 0.0
    background: bool = False
    cached: int = 0  # prompt tokens that were found in a prefix cache when it was recorded


AT = ("arrival_s", "arrival", "TIMESTAMP", "timestamp")
PROMPT = ("input_tokens", "prompt_tokens", "input_length", "ContextTokens")
OUTPUTS = ("output_tokens", "output_length", "GeneratedTokens")


def read_trace(path: Path, *, limit: int | None = None) -> list[Arrival]:
    """All requests of a trace, in the order they arrive, the first at 0."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            found = list(_limited(_rows(path, file), limit))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {type(error).__name__}: {error}") from None
    if not found:
        raise ConfigError(f"the trace {path} is empty")
    start = min(one.at for one in found)
    return sorted((one._replace(at=one.at - start) for one in found), key=lambda one: one.at)


def _limited(rows: Iterable[Mapping[str, Any]], limit: int | None) -> Iterator[Arrival]:
    for number, row in enumerate(rows):
        if limit is not None and number >= limit:
            return
        yield _arrival(row)


def _rows(path: Path, file: Iterable[str]) -> Iterable[Mapping[str, Any]]:
    if path.suffix.lower() == ".csv":
        return csv.DictReader(file)
    return filter(_is_request, map(json.loads, filter(str.strip, file)))


def _is_request(row: Mapping[str, Any]) -> bool:
    """Whether a line of the server's log is about a request that ended; lines of traces all are."""
    return "logger" not in row or bool(row.get("prompt_tokens") and row.get("output_tokens"))


def _arrival(row: Mapping[str, Any]) -> Arrival:
    blocks, block = row.get("hash_ids") or (), TRACE_BLOCK
    for name in row:
        if name.startswith("blocks_"):
            blocks, block = row[name] or (), int(name.removeprefix("blocks_"))
    return Arrival(
        at=_seconds(row),
        prompt=max(1, int(_first(row, PROMPT))),
        outputs=max(1, int(_first(row, OUTPUTS))),
        blocks=tuple(blocks),
        block=block,
        tenant=str(row.get("tenant") or row.get("key") or ""),
        ttft=float(row.get("ttft_s") or 0.0),
        tpot=float(row.get("tpot_s") or 0.0),
        background=str(row.get("background") or "").lower() in ("true", "1"),
        cached=int(row.get("cached_tokens") or 0),
    )


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise KeyError(f"no column {' or '.join(names)}")


def _seconds(row: Mapping[str, Any]) -> float:
    """Mooncake counts milliseconds in a column of its own name, Azure writes dates."""
    if "logger" in row:  # the server's log says when a request ended
        return datetime.fromisoformat(row["time"]).timestamp() - float(row.get("seconds") or 0.0)
    for name in AT:
        value = row.get(name)
        if value is not None:
            if name == "TIMESTAMP":
                return datetime.fromisoformat(value[:26]).timestamp()
            return float(value) / (1000 if name == "timestamp" else 1)
    raise KeyError(f"no column {' or '.join(AT)}")


def prompt_tokens(one: Arrival, number: int) -> list[int]:
    """Stand-ins for the tokens of a prompt: the id of their block, or of the request where blocks are not told."""
    tokens: list[int] = []
    for block in one.blocks:
        tokens += [block + 1] * one.block  # 0 is the stop token
    own = -(number + 1)
    return tokens[: one.prompt] + [own] * (one.prompt - len(tokens))
