"""How much traffic a device takes, from its cost model alone: what each request adds to steps that are always full.

Refuses to know: order, waiting; a simulation tells of these.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from quire.simulation.traces import Arrival
from quire.types.cost_model import CostModel

FULL_STEP_S = 0.05  # a step that has enough to do; the base of each is shared by all in it


def request_seconds(model: CostModel, one: Arrival, cached: int = 0) -> float:
    """Device time that a request adds, its first `cached` tokens being in the prefix cache."""
    rates, fresh, drawn = model.rates, max(1, one.prompt - cached), one.outputs
    token = rates.tokens + rates.beyond
    return (
        token * (fresh + drawn)
        + rates.rows * (1 + drawn)
        + rates.pairs * fresh * fresh / 2
        + rates.context_pair * fresh * cached
        + rates.context * drawn * (one.prompt + drawn / 2)
    )


def shared_tokens(trace: Sequence[Arrival], room: float = math.inf) -> list[int]:
    """Of each prompt, the tokens whose blocks were asked for before: hits of a prefix cache with `room` for so many
    tokens, which forgets those asked for longest ago first."""
    known: OrderedDict[int, None] = OrderedDict()
    found = []
    for one in trace:
        hit = 0
        for block in one.blocks:
            if block not in known:
                break
            hit += one.block
        for block in one.blocks:
            known[block] = None
            known.move_to_end(block)
        while len(known) * one.block > room:
            known.popitem(last=False)
        found.append(min(hit, one.prompt - 1))
    return found


def capacity_rps(model: CostModel, trace: Sequence[Arrival]) -> float:
    """Requests per second of such traffic that keep one replica busy."""
    work = sum(request_seconds(model, one, hit) for one, hit in zip(trace, shared_tokens(trace), strict=True))
    share = max(0.1, 1 - model.rates.base / FULL_STEP_S)
    return share * len(trace) / work


def replicas_for(model: CostModel, trace: Sequence[Arrival], rate: float, load: float) -> int:
    """So many that each has at most this share of what it can serve."""
    return max(1, math.ceil(rate / (load * capacity_rps(model, trace))))
