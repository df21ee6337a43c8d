"""Made-up traffic: when requests arrive (Poisson, gamma bursts, a daily wave) and what they ask for.

Refuses to know: replicas, clocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from random import Random

from quire.simulation.traces import Arrival
from quire.types.errors import ConfigError

Asks = Callable[[Random], Arrival]  # one request, whenever it arrives
SYSTEM_BLOCK = 256  # tokens of a block of made-up conversations
LAP = 1 << 44  # between the block ids of a trace and those of its repetition
WAVE_DEPTH = 0.8  # of a daily wave: how far the rate goes up and down around its mean


def arrivals(kind: str, rate: float, seed: int) -> Iterator[float]:
    """Moments at a mean `rate` per second. `poisson`; `gamma:SHAPE` (below 1 it comes in bursts); `diurnal:SECONDS`
    (a wave of that period)."""
    name, _, value = kind.partition(":")
    rng, now = Random(f"arrivals/{seed}"), 0.0
    if not 0 < rate < math.inf:
        raise ConfigError(f"rate must be a finite number above 0, got {rate:g}")
    if name == "poisson" and not value:
        while True:
            now += rng.expovariate(rate)
            yield now
    if name == "gamma" and (shape := _number(kind, value)):
        while True:
            now += rng.gammavariate(shape, 1 / (rate * shape))
            yield now
    if name == "diurnal" and (period := _number(kind, value)):
        most = rate * (1 + WAVE_DEPTH)
        while True:  # thinned from a Poisson process at the highest rate
            now += rng.expovariate(most)
            if rng.random() * most < rate * (1 + WAVE_DEPTH * math.sin(2 * math.pi * now / period)):
                yield now
    raise ConfigError(f"arrivals must be poisson, gamma:SHAPE or diurnal:SECONDS, got {kind!r}")


def _number(kind: str, value: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise ConfigError(f"arrivals {kind!r}: what follows the colon must be a number above 0")
    return found


def _lognormal(rng: Random, median: float, sigma: float, low: int, high: int) -> int:
    return int(min(high, max(low, rng.lognormvariate(math.log(median), sigma))))


def chat(rng: Random) -> Arrival:
    """Lengths of ShareGPT's class: means near 200 in and 200 out."""
    return Arrival(0.0, _lognormal(rng, 110, 1.15, 4, 1024), _lognormal(rng, 140, 0.95, 4, 1024))


def mix(rng: Random) -> Arrival:
    """Nine short interactive requests to one long piece of batch work, each kind with a tenant and targets of its own:
    0.5 s to the first token and 50 ms a token, 30 s and 200 ms."""
    if rng.random() < 0.9:
        prompt, outputs = _lognormal(rng, 180, 0.8, 8, 1500), _lognormal(rng, 60, 0.7, 4, 400)
        return Arrival(0.0, prompt, outputs, tenant="interactive", ttft=0.5, tpot=0.05)
    prompt, outputs = _lognormal(rng, 6000, 0.6, 1500, 30000), _lognormal(rng, 500, 0.6, 100, 2000)
    return Arrival(0.0, prompt, outputs, tenant="batch", ttft=30.0, tpot=0.2)


def conversations(rng: Random) -> Asks:
    """Multi-turn chats over a few system prompts: a turn begins with all that was said before it."""
    systems = [tuple((s << 40) + i for i in range(4)) for s in range(8)]
    open_: list[tuple[int, ...]] = []
    fresh = iter(range(1 << 45, 1 << 60))

    def ask(rng: Random) -> Arrival:
        begun = open_.pop(rng.randrange(len(open_))) if open_ and rng.random() < 0.75 else rng.choice(systems)
        outputs = _lognormal(rng, 140, 0.8, 4, 1024)
        said = begun + tuple(next(fresh) for _ in range(1 + outputs // SYSTEM_BLOCK))
        open_.append(said)
        tail = rng.randrange(SYSTEM_BLOCK)
        return Arrival(0.0, len(said) * SYSTEM_BLOCK - tail, outputs, said, SYSTEM_BLOCK)

    return ask


WORKLOADS: dict[str, Callable[[Random], Asks]] = {
    "chat": lambda rng: chat,
    "mix": lambda rng: mix,
    "conversations": conversations,
}


def synthetic(workload: str, count: int, rate: float, seed: int, kind: str = "poisson") -> list[Arrival]:
    """`count` requests of a made-up workload."""
    if workload not in WORKLOADS:
        raise ConfigError(f"workload must be one of {', '.join(WORKLOADS)}, got {workload!r}")
    rng = Random(f"{workload}/{seed}")
    ask = WORKLOADS[workload](rng)
    return [ask(rng)._replace(at=at) for at, _ in zip(arrivals(kind, rate, seed), range(count), strict=False)]


def resampled(trace: Sequence[Arrival], count: int, rate: float, seed: int, kind: str = "poisson") -> list[Arrival]:
    """A stretch of a trace, from a random place on, at another rate: its own order and prefixes, new moments. Where
    more is asked for than it has, it comes again, with other content."""
    first = Random(f"stretch/{seed}").randrange(max(1, len(trace) - count))
    moments = arrivals(kind, rate, seed)
    found = [one._replace(at=next(moments)) for one in trace[first : first + count]]
    for number in range(len(found), count):
        lap, place = divmod(number, len(trace))
        blocks = tuple(block + lap * LAP for block in trace[place].blocks)
        found.append(trace[place]._replace(at=next(moments), blocks=blocks))
    return found
