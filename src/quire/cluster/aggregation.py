"""Several engines' answers as one: counters and gauges add up, lists follow each other.

Refuses to know: where the answers come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import msgspec
from msgspec.structs import fields, replace

from quire.types.cache_control import CacheReport
from quire.types.events import TierStats
from quire.types.histogram import Histogram
from quire.types.view import OWNED, EngineView, PrefixNode

Kind = TypeVar("Kind", bound=msgspec.Struct)

PER_ENGINE = {"page_bytes", "page_tokens", "preempted_most"}  # the largest counts, not the sum


def sum_stats(parts: Sequence[Kind]) -> Kind:
    """All numbers of structs of one kind, added field by field; tiers by their names."""
    first = parts[0]
    values = {one.name: [getattr(part, one.name) for part in parts] for one in fields(first)}
    return replace(first, **{name: _added(name, found) for name, found in values.items()})


def _added(name: str, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, bool):
        return all(values)
    if isinstance(first, str):
        return first
    if name in PER_ENGINE:
        return max(values)
    if isinstance(first, (int, float)):
        return sum(values)
    if isinstance(first, dict):
        total: Counter[str] = Counter()
        for value in values:
            total.update(value)
        return dict(total)
    if isinstance(first, Histogram):
        counts = [sum(each) for each in zip(*(value.counts for value in values), strict=True)]
        return Histogram(first.bounds, counts, sum(value.total for value in values))
    if name == "handovers":
        found = [value for value in values if value is not None]
        return sum_stats(found) if found else None
    if name == "tiers":
        return _tiers([tier for value in values for tier in value])
    if name == "accepted_at":
        return [sum(each) for each in zip_longest(*values, fillvalue=0)]
    return [item for value in values for item in value]


def _tiers(tiers: list[TierStats]) -> list[TierStats]:
    by_name: dict[str, list[TierStats]] = {}
    for tier in tiers:
        by_name.setdefault(tier.name, []).append(tier)
    return [sum_stats(same) for same in by_name.values()]


def merge_reports(reports: Sequence[CacheReport]) -> CacheReport:
    """Rates and shares are means: they do not add up."""
    total = sum_stats(reports)
    total.hit_rate /= len(reports)
    total.rates = {name: value / len(reports) for name, value in total.rates.items()}
    return total


def merge_views(views: Sequence[EngineView], names: Sequence[str]) -> EngineView:
    """`names`: of the engines, told apart by them where they show pages of their own."""
    prefixes: list[PrefixNode] = []
    for view in views:
        shift = len(prefixes)
        prefixes += [replace(one, parent=one.parent + shift if one.parent >= 0 else -1) for one in view.prefixes]
    owners: list[str] = []
    tiers = []
    for name, view in zip(names, views, strict=True):
        shift = len(owners)
        owners += view.owners
        for tier in view.tiers:
            cells = [cell + shift if cell >= OWNED else cell for cell in tier.cells]
            tiers.append(replace(tier, name=f"{name} {tier.name}", cells=cells))
    return replace(
        views[0],
        now=max(view.now for view in views),
        stats=sum_stats([view.stats for view in views]),
        slots=sum(view.slots for view in views),
        max_batch_tokens=sum(view.max_batch_tokens for view in views),
        sequences=[one for view in views for one in view.sequences],
        owners=owners,
        tiers=tiers,
        prefixes=prefixes,
        steps=[step for view in views for step in view.steps],
    )
