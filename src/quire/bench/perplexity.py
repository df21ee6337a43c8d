"""The perplexity of a text: windows of it in turn, each token scored by those of its window before it.

Refuses to know: how the model is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from quire.engine.llm import LLM
from quire.engine.request_progress import RequestProgress
from quire.types.errors import ConfigError
from quire.types.sampling_params import SamplingParams

BATCH = 16  # windows asked for at once


class Perplexity(NamedTuple):
    value: float
    tokens: int  # that were scored


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the text {path}: {error}") from error


def windows(ids: Sequence[int], length: int, most: int | None = None) -> list[list[int]]:
    """Runs of `length` tokens, the last of them shorter; at most so many."""
    found = [list(ids[first : first + length]) for first in range(0, len(ids), length)]
    return [window for window in found if len(window) > 1][:most]


def perplexity(llm: LLM, parts: Sequence[Sequence[int]]) -> Perplexity:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    total, tokens = 0.0, 0
    with RequestProgress(len(parts), what="windows") as progress:
        for first in range(0, len(parts), BATCH):
            for out in llm.generate([list(part) for part in parts[first : first + BATCH]], params):
                scores = [scored.logprob for scored in out.prompt_logprobs or []]
                total, tokens = total + sum(scores), tokens + len(scores)
                progress.ended()
    if not tokens:
        raise ConfigError("the text is too short to score; it needs at least two tokens")
    return Perplexity(math.exp(-total / tokens), tokens)
