"""What a cluster's API process spends on its replicas, in seconds of the CPU: `python scripts/control_plane_costs.py`.

Frames of tokens and of cache events taken in, stats of all replicas read and an autoscaler's decision made, bytes that
the directory of prefixes takes. Decisions of routers are `scripts/routing_speed.py`'s.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable
from random import Random

import msgspec

from quire.cluster.autoscaler import Autoscaler, FleetMeter
from quire.cluster.prefix_directory import PrefixDirectory
from quire.types.autoscaling import AutoscaleOptions
from quire.types.events import EngineStats, TokenEvent
from quire.types.messages import CacheEvents, Events, Reply, Stats, ToClient

ROUNDS = 200
TOKENS, BLOCKS = 64, 8  # of a frame: requests that drew one, blocks that entered and as many that left


def timed(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Seconds of the CPU for one round."""
    began = time.process_time()
    for _ in range(rounds):
        work()
    return (time.process_time() - began) / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=256)
    asked = parser.parse_args()
    rng, count = Random(0), asked.replicas
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToClient)

    frame = encoder.encode(
        Events([TokenEvent(f"cmpl-{i:032x}", 0, 100 + i, [rng.randrange(1 << 17)]) for i in range(TOKENS)])
    )
    print(
        f"a frame of {TOKENS} tokens: {len(frame)} bytes, {1e6 * timed(lambda: decoder.decode(frame)):.1f} us to read"
    )

    tracemalloc.start()
    directory = PrefixDirectory(count, 1 << 12)
    names = [[rng.randbytes(16) for _ in range(1 << 11)] for _ in range(count)]
    before = tracemalloc.get_traced_memory()[0]
    for replica, held in enumerate(names):
        directory.add(replica, held)
    each = (tracemalloc.get_traced_memory()[0] - before) / sum(map(len, names)) + len(names[0][0]) + 33
    tracemalloc.stop()
    print(f"the directory: {each:.0f} bytes a block of a replica, its name included")

    feed = [(rng.randrange(count), [rng.randbytes(16) for _ in range(BLOCKS)]) for _ in range(ROUNDS)]
    news = [
        (replica, encoder.encode(CacheEvents(fresh, [names[replica].pop() for _ in range(BLOCKS)])))
        for replica, fresh in feed
    ]
    following = iter(news)

    def learn() -> None:
        replica, data = next(following)
        told = decoder.decode(data)
        assert isinstance(told, CacheEvents)
        directory.remove(replica, told.removed)
        directory.add(replica, told.stored)

    print(f"cache events, {BLOCKS} blocks in and {BLOCKS} out: {len(news[0][1])} bytes, {1e6 * timed(learn):.1f} us")

    reply = encoder.encode(Reply(1, Stats(EngineStats())))
    autoscaler = Autoscaler(AutoscaleOptions(max_replicas=count), count)
    meter, clock = FleetMeter(), iter(range(1 << 30))

    def scale() -> None:
        found = {}
        for replica in range(count):
            told = decoder.decode(reply)
            assert isinstance(told, Reply) and isinstance(told.answer, Stats)
            found[replica] = told.answer.stats
        autoscaler.decide(float(next(clock)), meter.sample(found, count, 0))

    print(f"an autoscaler's look at {count} replicas: {count * len(reply)} bytes, {1e3 * timed(scale, 20):.1f} ms")


if __name__ == "__main__":
    main()
