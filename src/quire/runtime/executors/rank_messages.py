"""What rank 0 tells the other ranks of an engine, and what they answer: one frame each, msgpack over a socket pair."""

from __future__ import annotations

import msgspec

from quire.generation.drafting.speculation import TreeRow
from quire.types.plan import Capacity, StepPlan


class StartRank(msgspec.Struct, tag=True):
    """Allocate pages and slots; steps follow."""

    capacity: Capacity


class Forward(msgspec.Struct, tag=True):
    """A step with its drafts laid out."""

    plan: StepPlan
    tree_rows: dict[int, TreeRow]


class StoreSamples(msgspec.Struct, tag=True):
    """The tokens that follow by broadcast were sampled at these places."""

    slots: list[int]
    positions: list[int]


class KeepBranch(msgspec.Struct, tag=True):
    slot: int
    position: int
    tokens: list[int]
    indices: list[int]


class KeepState(msgspec.Struct, tag=True):
    slot: int
    accepted: int


class EndRank(msgspec.Struct, tag=True):
    pass


ToRank = StartRank | Forward | StoreSamples | KeepBranch | KeepState | EndRank


class RankJoined(msgspec.Struct, tag=True):
    """The process runs, and is about to meet the others."""


class RankReady(msgspec.Struct, tag=True):
    """Its weights are in; so many pages would fit beside them, of so many bytes."""

    pages: int
    page_bytes: int


class RankStarted(msgspec.Struct, tag=True):
    """It waits for steps."""


class RankFailed(msgspec.Struct, tag=True):
    reason: str


FromRank = RankJoined | RankReady | RankStarted | RankFailed
