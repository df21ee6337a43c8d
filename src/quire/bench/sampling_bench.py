"""What drawing costs: the same requests answered greedily and with sampling parameters in turn, one engine for all.

Outputs end by length, so every form delivers as many tokens. Refuses to know: how tokens are drawn.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.bench.offline import run_workload
from quire.bench.workloads import Workload
from quire.engine.link import Link
from quire.types.grammar import GrammarSpec

GREEDY = "greedy"
_CHAT: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9}
_RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}, "town": {"enum": ["Oslo"]}},
    "required": ["name", "age", "town"],
}


def _endless(item: dict[str, Any]) -> GrammarSpec:
    """JSON that goes on for longer than anybody asks for."""
    return GrammarSpec("json_schema", json.dumps({"type": "array", "items": item, "minItems": 100_000}))


FORMS: dict[str, dict[str, Any]] = {
    GREEDY: {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_p": _CHAT,
    "top_k": {"temperature": 0.7, "top_k": 50},
    "top_k+top_p": {**_CHAT, "top_k": 50},
    "min_p": {"temperature": 0.7, "min_p": 0.05},
    "penalties": {**_CHAT, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs": {**_CHAT, "logprobs": 5},
    "bias": {**_CHAT, "logit_bias": {17: 2.0, 100: -3.0}},
    "schema": {**_CHAT, "grammar": _endless({"type": "string", "minLength": 60})},
    "records": {**_CHAT, "grammar": _endless(_RECORD)},
}


@dataclass
class Cost:
    form: str
    seconds: list[float]  # by round
    over: float  # the median of rounds: how much longer than greedy in the same round, 0.03 for 3%
    tokens: int


def measure(link: Link, work: Workload, forms: Sequence[str], rounds: int) -> list[Cost]:
    """Greedy comes first in every round; the first round is not measured."""
    forms = [GREEDY, *(form for form in forms if form != GREEDY)]
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    tokens = {}
    for number in range(rounds + 1):
        for form in forms:
            run = run_workload(link, work, sampling=FORMS[form])
            tokens[form] = run.stats.output_tokens
            if number:
                seconds[form].append(run.seconds)
    over = {
        form: statistics.median(a / b - 1 for a, b in zip(taken, seconds[GREEDY], strict=True))
        for form, taken in seconds.items()
    }
    return [Cost(form, seconds[form], over[form], tokens[form]) for form in forms]
