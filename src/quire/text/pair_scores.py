"""Pairs of texts and how well they go together: what `score` and `rerank` share. Refuses to know: the engine."""

from __future__ import annotations

from collections.abc import Sequence

from quire.types.errors import InputError
from quire.types.pooling import PoolingInfo


def scores_pairs(pooling: PoolingInfo) -> bool:
    """Whether a classification head scores pairs (a cross-encoder); else embeddings are compared."""
    if len(pooling.labels) > 1:
        raise InputError(f"this model has {len(pooling.labels)} classes; pairs are scored by models with one, or none")
    return bool(pooling.labels)


def text_pairs(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """One text with each of several, or as many as there are others, in order."""
    ones, others = ([text] if isinstance(text, str) else list(text) for text in (first, second))
    if not ones or not others:
        raise InputError("there is nothing to score: give at least one text on each side")
    if len(ones) == 1:
        ones *= len(others)
    if len(ones) != len(others):
        raise InputError(f"{len(ones)} texts cannot be paired with {len(others)}; give one, or as many")
    return list(zip(ones, others, strict=True))


def cosine(one: list[float], other: list[float]) -> float:
    """Of vectors of length one."""
    return sum(a * b for a, b in zip(one, other, strict=True))


def ranked(scores: Sequence[float], top_n: int = 0) -> list[tuple[int, float]]:
    """(index, score), best first; all, or the best so many."""
    best = sorted(enumerate(scores), key=lambda pair: -pair[1])
    return best[:top_n] if top_n > 0 else best
