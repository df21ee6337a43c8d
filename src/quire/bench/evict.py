"""What KV eviction costs: perplexity of a long text and needles in a haystack, by every policy at the same KV budget.

    full        no budget: attention to everything, as far as the model was trained for
    recompute   a window of the budget's size computed anew for every quarter of it: what a budget is measured against
    sinks ...   one pass with `kv_budget` and that `kv_eviction`

Perplexities are those of a text's last tokens, when budgets have long been full. A needle is a pass key in one sentence
somewhere in other text, asked for at the end; found means that the answer begins with it. Refuses to know: how pages
are chosen.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from quire.engine.llm import LLM
from quire.types.outputs import RequestOutput
from quire.types.sampling_params import EVICTION, SamplingParams

WAYS = ("full", "recompute", *EVICTION)
NEEDLE = "\nThe pass key is {}. Remember it. {} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


def long_text(llm: LLM, tokens: int, file: str | None = None) -> list[int]:
    """So many tokens of a text: a file's, or the Python language reference that comes with the interpreter."""
    if file is not None:
        with open(file, encoding="utf-8") as opened:
            text = opened.read(tokens * 16)
    else:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics))[: tokens * 16]
    ids = llm.text.tokenizer.encode(text)
    return (ids * -(-tokens // len(ids)))[:tokens]


def perplexity(llm: LLM, text: Sequence[int], way: str, budget: int, tail: int) -> float:
    """Of the last `tail` tokens of a text."""
    if way == "recompute":
        scores = _recomputed(llm, text, budget, tail)
    else:
        (scores,) = _scores(llm, [list(text)], way, budget)
    return math.exp(-sum(scores[-tail:]) / tail)


def _recomputed(llm: LLM, text: Sequence[int], budget: int, tail: int) -> list[float]:
    step = budget // 4
    ends = range(len(text) - tail + step, len(text) + step, step)
    windows = [list(text[max(0, min(end, len(text)) - budget) : end]) for end in ends]
    found = _scores(llm, windows, "full", budget)
    return [score for scores in found for score in scores[-step:]]


def _scores(llm: LLM, texts: list[list[int]], way: str, budget: int) -> list[list[float]]:
    """Log-probability of every token but the first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, **_eviction(way, budget))
    return [[p.logprob for p in out.prompt_logprobs or []] for out in _answers(llm, texts, params)]


def _answers(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    return llm.generate(prompts, params, progress=sys.stderr.isatty())


def _eviction(way: str, budget: int) -> dict[str, Any]:
    return {"kv_budget": budget, "kv_eviction": way} if way in EVICTION else {}


def needles(llm: LLM, way: str, budget: int, length: int, num: int, filler: Sequence[int], seed: int = 1) -> float:
    """Share of pass keys found in haystacks of `length` tokens."""
    rng, encode = Random(seed), llm.text.tokenizer.encode
    prompts, keys = [], []
    question = encode(QUESTION, add_special=False)
    for i in range(num):
        keys.append(str(rng.randrange(10_000, 100_000)))
        needle = encode(NEEDLE.format(keys[-1], keys[-1]), add_special=False)
        room = length - len(needle) - len(question)
        first = rng.randrange(max(1, len(filler) - room))
        hay, at = list(filler[first : first + room]), int(room * DEPTHS[i % len(DEPTHS)])
        prompts.append([*hay[:at], *needle, *hay[at:], *question])
    if way == "recompute":
        prompts = [prompt[-budget:] for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=8, **_eviction(way, budget))
    answers = [out.outputs[0].text.strip() for out in _answers(llm, prompts, params)]
    return sum(answer.startswith(key) for answer, key in zip(answers, keys, strict=True)) / num


def compare(
    llm: LLM, ways: Sequence[str], *, budget: int, inside: int, beyond: int, tail: int, haystack: int, num: int,
    file: str | None = None, seed: int = 1,
) -> dict[str, dict[str, float | None]]:  # fmt: skip
    """Figures by way: perplexity inside the trained context and beyond it, needles found, seconds."""
    text = long_text(llm, max(inside, beyond), file)
    found: dict[str, dict[str, float | None]] = {}
    for way in ways:
        figures = found[way] = {"inside": perplexity(llm, text[:inside], way, budget, tail)}
        began = time.perf_counter()
        figures["beyond"] = None if way == "full" else perplexity(llm, text[:beyond], way, budget, tail)
        figures["seconds"] = None if way == "full" else time.perf_counter() - began
        llm.reset()
        figures["needles"] = needles(llm, way, budget, haystack, num, text, seed) if num else None
        llm.reset()
    return found


def rows(found: dict[str, dict[str, float | None]], inside: int, beyond: int) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("way", f"perplexity of {inside}", f"perplexity of {beyond}", "s", "needles found")]
    for way, figures in found.items():
        shown = ((figures["inside"], ".2f"), (figures["beyond"], ".2f"), (figures["seconds"], ".0f"))
        cells = ["-" if value is None else format(value, style) for value, style in shown]
        lines.append((way, *cells, "-" if figures["needles"] is None else f"{figures['needles']:.0%}"))
    return lines
