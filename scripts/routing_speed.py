"""Decisions a second of each router on one core: `python scripts/routing_speed.py [--replicas 256] [--blocks 1000000]`.

Prompts of 2048 tokens in 32 blocks of 64, the first 24 of them one of many shared prefixes and the rest their own; the
directory is full, so that every decision forgets blocks too. Requests end as fast as they come. Seconds are of the CPU.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import deque
from collections.abc import Hashable
from random import Random

from quire.cluster.router_policy import ReplicaLoad, RouteView
from quire.cluster.routers import ROUTERS, make_router
from quire.types.hashing import PageHasher, new_key

TOKENS, BLOCK_TOKENS, SHARED = 2048, 64, 24
BLOCKS = TOKENS // BLOCK_TOKENS
PAGE = 16  # tokens that replicas name together
OPEN = 4096  # requests under way
RATE = 5000.0  # that arrive in a second, for routers that look at times


def routed(name: str, replicas: int, blocks: int, decisions: int) -> float:
    """Decisions a second, in the steady state."""
    rng = Random(0)
    router = make_router(name, replicas, capacity=blocks // replicas)
    loads = [ReplicaLoad() for _ in range(replicas)]
    prefixes = [[rng.randbytes(16) for _ in range(SHARED)] for _ in range(max(1, blocks // SHARED // 4))]
    if router.directory is not None:  # full before the clock starts: the prefixes, behind what nobody asks for any more
        for replica in range(replicas):
            for _ in range(blocks // replicas // BLOCKS + 1):
                router.directory.use(replica, [rng.randbytes(16) for _ in range(BLOCKS)])
        for number, prefix in enumerate(prefixes):
            router.directory.use(number % replicas, prefix)
    requests = [
        RouteView(TOKENS, prefixes[rng.randrange(len(prefixes))] + [rng.randbytes(16) for _ in range(BLOCKS - SHARED)],
                  session=str(number % 5000), id=number, now=number / RATE, ttft=2.0, tpot=0.05)
        for number in range(decisions)
    ]  # fmt: skip
    under_way: deque[tuple[int, Hashable]] = deque()
    gc.collect()
    gc.freeze()  # as the server does when it is ready
    began = time.process_time()
    for request in requests:
        chosen = router.choose(request, loads)
        loads[chosen].sent(request.tokens - router.saved)
        loads[chosen].prefilled(request.tokens - router.saved)
        router.first_token(request.id, request.now + 0.2)
        under_way.append((chosen, request.id))
        if len(under_way) > OPEN:
            ended, id = under_way.popleft()
            loads[ended].ended(0)
            router.ended(id, request.now, 64)
    seconds = time.process_time() - began
    if router.directory is not None:
        print(f"  {len(router.directory):,} blocks in the directory")
    return decisions / seconds


def named(decisions: int) -> float:
    """Prompts a second whose blocks are named, a step before any decision; shared beginnings are met again."""
    rng, hasher = Random(0), PageHasher(new_key(), PAGE)
    root = hasher.root("")
    common = SHARED * BLOCK_TOKENS
    shared = [[rng.randrange(50_000) for _ in range(common)] for _ in range(64)]
    prompts = [shared[rng.randrange(64)] + [rng.randrange(50_000)] * (TOKENS - common) for _ in range(decisions)]
    began = time.process_time()
    for prompt in prompts:
        hasher.chain(root, prompt)
    return decisions / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="cached by all replicas together")
    parser.add_argument("--decisions", type=int, default=50_000)
    asked = parser.parse_args()
    if min(asked.replicas, asked.decisions) < 1 or asked.blocks < asked.replicas:
        parser.error("it takes one replica, one decision, and a block for each replica at least")
    print(f"{asked.replicas} replicas, {asked.blocks:,} cached blocks")
    for name in ROUTERS:
        print(f"{name:>14}: {routed(name, asked.replicas, asked.blocks, asked.decisions):,.0f} decisions/s")
    print(f"{'naming':>14}: {named(asked.decisions // 5):,.0f} prompts/s of {TOKENS} tokens")


if __name__ == "__main__":
    main()
