"""What a model is for beside generating: how its hidden states are pooled, and which classes it scores."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

Activation = Literal["softmax", "sigmoid", "identity"]
ENCODER = "this model is an encoder: it embeds, scores and classifies texts, and generates none"


class PoolingInfo(msgspec.Struct, frozen=True):
    encoder: bool = False  # sees what comes later too, and generates nothing
    pooling: str = "mean"  # unless a request says otherwise: mean, cls or last
    normalized: bool = True  # embeddings are scaled to length one
    token_types: int = 0  # vectors of segments: the second text of a pair is told from the first by them
    labels: list[str] = []  # of the classes that the model scores; none: it has no classification head
    activation: Activation = "softmax"  # what makes probabilities of those scores

    def probabilities(self, scores: list[float]) -> list[float]:
        if self.activation == "identity":
            return scores
        if self.activation == "sigmoid":
            return [_sigmoid(score) for score in scores]
        most = max(scores)
        parts = [math.exp(score - most) for score in scores]
        return [part / sum(parts) for part in parts]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def unit(vector: list[float]) -> list[float]:
    """Scaled to length one."""
    length = math.hypot(*vector) or 1.0
    return [x / length for x in vector]
