"""Context parallelism as facts: which decoders can run so, and the bytes that ranks exchange.

Every rank has all weights, or a tensor-parallel rank's part of them. What it computes and keeps of a step,
`kernels/context_split.py` says. Refuses to know: how
ranks talk.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.kernels.context_split import zigzag
from quire.model.decoder_spec import Attending, DecoderSpec
from quire.types.errors import ConfigError


def context_spec(spec: DecoderSpec, size: int) -> DecoderSpec:
    """What every rank runs: the whole; ConfigError says why its context cannot be divided."""
    problem = ""
    if spec.encoder:
        problem = "an encoder computes whole sequences at once, and keeps nothing of them"
    elif spec.recurrent:
        kinds = {type(layer.mixer).__name__ for layer in spec.layers if not isinstance(layer.mixer, Attending)}
        problem = f"the states of its recurrent layers ({', '.join(sorted(kinds))}) go from token to token"
    if problem:
        raise ConfigError(f"context_parallel {size} cannot divide {spec.architecture}: {problem}")
    return spec


def own_tokens(count: int, rank: int, size: int) -> int:
    """Of a row of so many tokens, how many a rank computes."""
    return count if count < 2 * size else sum(map(len, zigzag(count, rank, size)))


def context_bytes(
    spec: DecoderSpec, rank: int, size: int, itemsize: int, rows: Sequence[tuple[int, int]], *, samples: int
) -> int:
    """What a rank sends in a step of rows with so many tokens before them and so many of their own, where only the last
    token of each row goes on behind the last layer that keeps anything; `itemsize` of its numbers."""
    divided = [(before, count) for before, count in rows if count >= 2 * size]
    short = [count for _, count in rows if count < 2 * size]
    passed_on = sum(own_tokens(count, (rank - hop) % size, size) for hop in range(size - 1) for _, count in divided)
    total = 8 * samples * (size - 1) if rank == 0 else 0
    for index, mixer in spec.attending.items():
        cut = index >= spec.last_kept and any(count > 1 for _, count in rows)
        asked = [
            sum(1 if cut else own_tokens(count, r, size) for before, count in divided if before) for r in range(size)
        ]
        replicated = len(short) if cut else sum(short)
        parts = 1 if mixer.values_from is not None else 2
        total += passed_on * parts * mixer.kv_heads * mixer.head_dim * itemsize  # keys and values, round the ring
        total += (size - 1) * asked[rank] * mixer.heads * mixer.head_dim * itemsize  # queries, to all
        back = sum(replicated + asked[other] for other in range(size) if other != rank)
        value = mixer.head_dim - (mixer.values_from or 0)
        total += back * mixer.heads * (value + 1) * 4  # float32 outputs and log-sum-exps, to whoever asked
    return total
