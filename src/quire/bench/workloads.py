"""Token-level workloads: what an engine is asked in a benchmark, as prompts of token ids and output lengths.

Seeded and free of text, so that every engine measured sees the same work; greedy generation that ignores EOS is
meant. The numbers of two runs compare only while these functions give the same tokens, which a test pins by digest.

Refuses to know: engines, tokenizers, clocks.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from functools import cache, partial
from importlib import resources
from random import Random
from typing import Any, NamedTuple

from quire.types.errors import ConfigError

VOCAB = 128_000  # token ids that prompts are made of, at most
_ORDINARY = 1000  # ids below this are often special; a vocabulary too small to spare them uses them all


class Job(NamedTuple):
    prompt: list[int]
    output_len: int


Workload = list[Job]


def chat(n: int = 1000, seed: int = 1, vocab: int = VOCAB) -> Workload:
    """Chat-like lengths (ShareGPT class): lognormal, 4 to 1024; means near 200 in and 200 out."""
    rng = Random(seed)

    def length(median: float, sigma: float) -> int:
        return int(min(1024, max(4, rng.lognormvariate(math.log(median), sigma))))

    work = []
    for _ in range(n):
        input_len, output_len = length(110, 1.15), length(140, 0.95)
        work.append(Job(_tokens(rng, input_len, vocab), output_len))
    return work


def fixed(n: int, n_in: int, n_out: int, seed: int = 0, vocab: int = VOCAB) -> Workload:
    """`n` unrelated prompts of one length, one output length."""
    return shared_prefix(n, 0, n_in, n_out, seed, vocab)


def shared_prefix(n: int, prefix: int, n_in: int, n_out: int, seed: int = 0, vocab: int = VOCAB) -> Workload:
    """`n` prompts that begin with the same `prefix` tokens and go on with `n_in` of their own."""
    rng = Random(seed)
    head = _tokens(rng, prefix, vocab)
    return [Job(head + _tokens(rng, n_in, vocab), n_out) for _ in range(n)]


def multi_turn(
    clients: int = 64, rounds: int = 5, n_in: int = 512, n_out: int = 64, seed: int = 0, vocab: int = VOCAB
) -> list[Workload]:
    """Conversations, one workload per round: only the fresh user tokens, one job per client.

    A round's real prompt is the client's last prompt, the engine's own answer to it, and these tokens.
    """
    rng = Random(seed)
    return [[Job(_tokens(rng, n_in, vocab), n_out) for _ in range(clients)] for _ in range(rounds)]


def trace_like(name: str, n: int, seed: int = 0) -> list[tuple[int, int]]:
    """(input length, output length) pairs, drawn apart from each other from the quantiles of a public trace.

    Names: azure2023_conv, azure2023_code, mooncake_conversation, mooncake_synthetic.
    """
    table = _quantiles()
    known = sorted(table.keys() - {"percentiles"})
    if name not in known:
        raise ConfigError(f"no trace is called {name!r}; the traces are {', '.join(known)}")
    points = [percent / 100 for percent in table["percentiles"]]
    rng = Random(seed)

    def draw(values: list[int]) -> int:
        u = rng.random()
        i = max(1, bisect_left(points, u))
        low, high = values[i - 1], values[i]
        return round(low + (high - low) * (u - points[i - 1]) / (points[i] - points[i - 1]))

    return [(draw(table[name]["in"]), draw(table[name]["out"])) for _ in range(n)]


# The runs for which other engines' times on one H200 are known (Llama-3.1-8B shape, vocabulary as in VOCAB).
H200: dict[str, partial[Workload]] = {
    "chat1000": partial(chat, 1000, seed=1),
    "decode_bs1": partial(fixed, 1, 128, 256, seed=11),
    "decode_bs8": partial(fixed, 8, 128, 256, seed=18),
    "decode_bs32": partial(fixed, 32, 128, 256, seed=42),
    "decode_bs128": partial(fixed, 128, 128, 256, seed=138),
    "decode_bs256": partial(fixed, 256, 128, 256, seed=266),
    "prefill_8x8192": partial(fixed, 8, 8192, 1, seed=50),
    "prefill_1x2048": partial(fixed, 1, 2048, 1, seed=51),
    "prefill_1x512": partial(fixed, 1, 512, 1, seed=52),
    "long_bs32_ctx8192": partial(fixed, 32, 8192, 128, seed=53),
    "prefix_256x2048": partial(shared_prefix, 256, 2048, 32, 32, seed=54),
}


def _tokens(rng: Random, n: int, vocab: int) -> list[int]:
    low, high = _ORDINARY if vocab > 2 * _ORDINARY else 0, min(vocab, VOCAB)
    return [rng.randrange(low, high) for _ in range(n)]


@cache
def _quantiles() -> dict[str, Any]:
    """Percentiles, and for each trace the lengths at them."""
    text = resources.files("quire.bench").joinpath("data/trace_quantiles.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table
