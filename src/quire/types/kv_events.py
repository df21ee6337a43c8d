"""KV cache events as vLLM publishes them, so that what routes to vLLM by them routes here too.

Structs are arrays on the wire, their name first:

    ["BlockStored", [hash, ...], parent or null, [token, ...], tokens a page, null, "GPU", null]
    ["BlockRemoved", [hash, ...], "GPU"]        ["AllBlocksCleared"]
"""

from __future__ import annotations

import msgspec


class BlockStored(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Pages, one behind the other, may be found from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None  # the page before the first of them; None: a prompt begins with it
    token_ids: list[int]  # of all of them
    block_size: int  # tokens of each
    lora_id: int | None
    medium: str | None  # GPU or CPU: where the pages are
    lora_name: str | None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, gc=False):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, gc=False):
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float  # seconds since 1970
    events: list[KVEvent]
    data_parallel_rank: int | None = None
