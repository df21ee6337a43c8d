"""What a schema costs: the same prompts answered under their schemas, and freely at the same lengths.

Free answers are drawn in the same way (temperature, seeds) and are as long as the constrained ones, so both runs
deliver equally many tokens. Grammars compile within the measured time, as they do in service.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from quire.bench.schemas import Schema, schemas
from quire.engine.llm import LLM
from quire.types.grammar import GrammarSpec
from quire.types.outputs import RequestOutput
from quire.types.request import FinishReason
from quire.types.sampling_params import SamplingParams

MAX_TOKENS = 512
TEMPERATURE = 0.7


def ask(llm: LLM, schema: Schema) -> list[int]:
    """The chat prompt that asks for an example of a schema."""
    text = f"Reply with one short example in JSON that follows this schema:\n{json.dumps(schema, ensure_ascii=False)}"
    return llm.text.encode_chat([{"role": "user", "content": text}])


def drawn(seed: int, **params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS, **params}, seed=seed)


def answer(llm: LLM, many: list[Schema]) -> list[RequestOutput]:
    """Answers to all schemas, each under its own."""
    params = [drawn(i, grammar=GrammarSpec("json_schema", json.dumps(schema))) for i, schema in enumerate(many)]
    return llm.generate([ask(llm, schema) for schema in many], params)


def measure(llm: LLM, count: int, *, seed: int = 1, rounds: int = 1) -> dict[str, float]:
    """Figures of `count` schemas; speeds are medians over `rounds`, constrained and free turn by turn."""
    many = schemas(count, seed)
    prompts = [ask(llm, s) for s in many]
    answer(llm, many[:1])  # first-use costs
    speeds: dict[str, list[float]] = {"constrained": [], "free": []}
    for _ in range(rounds):
        llm.reset()
        began = time.perf_counter()
        results = answer(llm, many)
        seconds = time.perf_counter() - began
        stats = llm.stats()
        lengths = [len(r.outputs[0].token_ids) for r in results]
        speeds["constrained"].append(sum(lengths) / seconds)
        llm.reset()
        free = [drawn(i, max_tokens=length, ignore_eos=True) for i, length in enumerate(lengths)]
        began = time.perf_counter()
        llm.generate(prompts, free)
        speeds["free"].append(sum(lengths) / (time.perf_counter() - began))
    finished = sum(r.outputs[0].finish_reason is FinishReason.STOP for r in results)
    with_schema, without = (statistics.median(speeds[kind]) for kind in ("constrained", "free"))
    return {
        "schemas": count,
        "finished": finished / count,
        "output_tokens": sum(lengths),
        "forced_tokens": stats.forced_tokens,
        "forced_share": stats.forced_tokens / max(1, stats.output_tokens),
        "constrained_tok_s": with_schema,
        "free_tok_s": without,
        "ratio": with_schema / without,
    }


def rows(summary: dict[str, float]) -> list[tuple[str, str]]:
    return [
        ("schemas", f"{summary['schemas']}"),
        ("finished", f"{summary['finished']:.1%} within {MAX_TOKENS} tokens"),
        ("output tokens", f"{summary['output_tokens']}"),
        ("steps saved", f"{summary['forced_tokens']} tokens forced ({summary['forced_share']:.1%})"),
        ("with a schema", f"{summary['constrained_tok_s']:.1f} tok/s"),
        ("without", f"{summary['free_tok_s']:.1f} tok/s"),
        ("ratio", f"{summary['ratio']:.2f}"),
    ]
