"""A Mamba-2 layer's facts, checked; families name their fields differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.model.families.architecture import Fields
from quire.model.recurrent_spec import Mamba2
from quire.types.errors import ModelFileError


def mamba2(fields: Fields, *, head_dim: Any, groups: int, **facts: Any) -> Mamba2:
    limit = fields.raw("time_step_limit") or (0.0, float("inf"))
    numbers = [_number(each) for each in limit] if isinstance(limit, (list, tuple)) else []
    known = [number for number in numbers if number is not None]
    if len(known) != 2 or len(numbers) != 2:
        raise ModelFileError(f"model config: time_step_limit should be two numbers, got {limit!r}")
    made = Mamba2(
        head_dim=Fields({"mamba head dimension": head_dim}).integer("mamba head dimension"),
        time_step_limit=(known[0], known[1]),
        groups=groups,
        norm_groups=groups,
        **facts,
    )
    if made.heads % made.groups:
        raise ModelFileError(f"model config: {made.heads} Mamba heads cannot share {made.groups} groups evenly")
    return made


def _number(said: Any) -> float | None:
    """JSON knows no infinity: transformers writes {"__float__": "Infinity"}."""
    if isinstance(said, Mapping) and said.get("__float__") == "Infinity":
        return float("inf")
    return float(said) if isinstance(said, (int, float)) and not isinstance(said, bool) else None
