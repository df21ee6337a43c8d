"""What is asked of simulated replicas, and when: traces as JSON lines or CSV.

Names of the public traces are known as they are: `arrival_s, input_tokens, output_tokens, blocks_512`; Azure's
`TIMESTAMP, ContextTokens, GeneratedTokens`; Mooncake's `timestamp` (ms), `input_length, output_length, hash_ids`.
Beside them a trace may say `tenant`, `ttft_s` and `tpot_s` (its targets), `background`. Equal block ids are equal
prefixes. Lines of the server's own log (`--log-format json`) are read too.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from operator import index
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
            found = list(islice(_arrivals(path, file), limit))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None
    if not found:
        raise ConfigError(f"the trace {path} is empty")
    start = min(one.at for one in found)
    return sorted((one._replace(at=one.at - start) for one in found), key=lambda one: one.at)


def _arrivals(path: Path, file: Iterable[str]) -> Iterator[Arrival]:
    number = 0
    try:
        if path.suffix.lower() == ".csv":
            table = csv.DictReader(file)
            for row in table:
                number = table.line_num
                yield _arrival(row)
        else:
            for line in file:
                number += 1
                if line.strip() and _is_request(row := _object(line)):
                    yield _arrival(row)
    except UnicodeDecodeError:
        raise
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"cannot read the trace {path}: line {number}: {error}") from None


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"must be a JSON object, got {line.strip()[:40]}")
    return found


def _is_request(row: Mapping[str, Any]) -> bool:
    """Whether a line of the server's log is about a request that ended; lines of traces all are."""
    return "logger" not in row or bool(row.get("prompt_tokens") and row.get("output_tokens"))


def _arrival(row: Mapping[str, Any]) -> Arrival:
    if None in row:
        raise ValueError("has more cells than there are columns; a list of blocks is quoted")
    blocks, block = _blocks(row)
    return Arrival(
        at=_seconds(row),
        prompt=max(1, _tokens(*_first(row, PROMPT))),
        outputs=max(1, _tokens(*_first(row, OUTPUTS))),
        blocks=blocks,
        block=block,
        tenant=str(row.get("tenant") or row.get("key") or ""),
        ttft=_amount("ttft_s", row.get("ttft_s") or 0.0),
        tpot=_amount("tpot_s", row.get("tpot_s") or 0.0),
        background=str(row.get("background") or "").lower() in ("true", "1"),
        cached=_tokens("cached_tokens", row.get("cached_tokens") or 0),
    )


def _blocks(row: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """Ids, and the tokens that each stands for. Tables have them as text: `[1, 2]` or `1 2`."""
    name = next((name for name in row if name.startswith("blocks_")), "hash_ids")
    size = name.removeprefix("blocks_") if name != "hash_ids" else str(TRACE_BLOCK)
    if not (size.isdecimal() and int(size)):
        raise ValueError(f"column {name!r} must say how many tokens a block has, as blocks_512 does")
    given = row.get(name) or ()
    try:
        ids = map(int, re.findall(r"[^][,\s]+", given)) if isinstance(given, str) else map(index, given)
        blocks = tuple(ids)
    except (TypeError, ValueError):
        blocks = (-1,)
    if min(blocks, default=0) < 0:
        raise ValueError(f"{name} must be whole numbers from 0 on, got {_shown(given)}")
    return blocks, int(size)


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    """The first of these that a row has, and its value."""
    for name in names:
        if row.get(name) not in (None, ""):
            return name, row[name]
    raise ValueError(f"has no {', '.join(names[:-1])} or {names[-1]}")


def _number(name: str, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{name} must be a finite number, got {_shown(value)}")
    return found


def _amount(name: str, value: Any) -> float:
    if (found := _number(name, value)) < 0:
        raise ValueError(f"{name} must not be negative, got {_shown(value)}")
    return found


def _tokens(name: str, value: Any) -> int:
    return int(_amount(name, value))


def _shown(value: Any) -> str:
    return repr(value)[:40]


def _seconds(row: Mapping[str, Any]) -> float:
    """Mooncake counts milliseconds in a column of its own name, Azure writes dates."""
    if "logger" in row:  # the server's log says when a request ended
        return _moment("time", row.get("time")) - _number("seconds", row.get("seconds") or 0.0)
    name, value = _first(row, AT)
    if name == "TIMESTAMP":
        return _moment(name, str(value)[:26])
    return _number(name, value) / (1000 if name == "timestamp" else 1)


def _moment(name: str, value: Any) -> float:
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        raise ValueError(f"{name} must be a date and a time, got {_shown(value)}") from None


def prompt_tokens(one: Arrival, number: int) -> list[int]:
    """Stand-ins for the tokens of a prompt: the id of their block, or of the request where blocks are not told."""
    tokens: list[int] = []
    for block in one.blocks:
        tokens += [block + 1] * one.block  # 0 is the stop token
    own = -(number + 1)
    return tokens[: one.prompt] + [own] * (one.prompt - len(tokens))
