"""Two sets of results beside each other: which figures differ by more than runs of the same thing do.

A side is one or several JSON files of the same command; the band of a figure is what its runs vary by (Student's t,
95%), or a given share of it where there is only one run. Refuses to know: which command wrote them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from quire.types.errors import ConfigError

# 97.5% points of Student's t, by degrees of freedom.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
LOWER_IS_BETTER = ("ttft", "tpot", "itl", "ttlt", "e2e", "latency", "wait", "preemptions", "refus", "failed", "lost",
                   "waste", "joules", "memory")  # fmt: skip
HIGHER_IS_BETTER = ("goodput", "throughput", "tok_s", "req_s", "rps", "hit_rate", "slo_share", "finished", "completed")


class Line(NamedTuple):
    """One figure of both sides. `band`: by how much they may differ and still be the same."""

    name: str
    before: float
    after: float
    band: float
    verdict: str  # better, worse or same

    @property
    def change(self) -> float:
        return self.after / self.before - 1 if self.before else math.inf if self.after else 0.0


def read_side(paths: Sequence[Path]) -> dict[str, list[float]]:
    """Figures by name, one value a file."""
    sides: list[dict[str, float]] = []
    for path in paths:
        try:
            sides.append(dict(_figures(json.loads(path.read_text(encoding="utf-8")))))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from None
    names = [name for name in sides[0] if all(name in side for side in sides)]
    return {name: [side[name] for side in sides] for name in names}


def _figures(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _figures(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            known = inner.get("phase") or inner.get("name") if isinstance(inner, dict) else None
            yield from _figures(inner, f"{name}[{known or number}]")
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield name, float(value)


def compare(before: dict[str, list[float]], after: dict[str, list[float]], noise: float) -> list[Line]:
    """Figures that both have and that say how good something is; `noise`: the share by which single runs vary."""
    lines = []
    for name in before:
        direction = _direction(name)
        if name not in after or not direction:
            continue
        one, two = mean(before[name]), mean(after[name])
        band = math.hypot(_error(before[name], noise), _error(after[name], noise))
        verdict = "same" if abs(two - one) <= band else "better" if (two - one) * direction > 0 else "worse"
        lines.append(Line(name, one, two, band, verdict))
    return lines


def _direction(name: str) -> int:
    """1: more is better; -1: less is; 0: it is no figure of merit."""
    if any(word in name for word in HIGHER_IS_BETTER):
        return 1
    return -1 if any(word in name for word in LOWER_IS_BETTER) else 0


def _error(values: list[float], noise: float) -> float:
    """Half the width of the band that the mean of such runs lies in."""
    if len(values) < 2:
        return abs(values[0]) * noise
    factor = T_95[len(values) - 2] if len(values) - 2 < len(T_95) else 1.96
    return factor * stdev(values) / math.sqrt(len(values))
