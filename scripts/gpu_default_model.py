"""Does the default model on a GPU follow the fp32 CPU path? Greedy answers to 20 prompts, and perplexity.

python scripts/gpu_default_model.py reference FILE.json MODEL     on any machine: fp32 on the CPU
python scripts/gpu_default_model.py compare FILE.json MODEL       on a GPU: float32 and bfloat16
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from quire.engine.llm import LLM
from quire.types.sampling_params import SamplingParams

PROMPTS = [
    "What is gravity?", "Write a haiku about the sea.", "Name three primary colours.", "Explain photosynthesis simply.",
    "List the planets in order.", "What does a compiler do?", "Tell me a story about a fox.", "How do magnets work?",
    "Give me a recipe for pancakes.", "What is the water cycle?", "Why is the sky blue?", "Describe a rainy day.",
    "What is the difference between a list and a tuple in Python?", "Who invented the telephone?", "What is an atom?",
    "How can I sleep better?", "Summarise the idea of evolution.", "What are prime numbers?",
    "Write a polite email asking for leave.", "What causes earthquakes?",
]  # fmt: skip
TOKENS = 48


def answers(model: str, **options) -> list[tuple[list[int], list[float]]]:
    """(tokens, gap between the best two log-probabilities at each)"""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=2, ignore_eos=True)
    with LLM(model, **options) as llm:
        found = llm.chat([[{"role": "user", "content": prompt}] for prompt in PROMPTS], params)
    return [
        (one.outputs[0].token_ids, [t.top_logprobs[0] - t.top_logprobs[1] for t in one.outputs[0].logprobs])
        for one in found
    ]


def perplexity(model: str, **options) -> float:
    """Over 2,000 tokens of English."""
    with LLM(model, **options) as llm:
        text = Path(__file__).parents[1] / "tests/native/data/text.txt"
        ids = llm.text.tokenizer.encode(text.read_text())[:2000]
        (found,) = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
    scores = [t.logprob for t in found.prompt_logprobs if t is not None]
    return math.exp(-sum(scores) / len(scores))


def compare(path: Path, model: str) -> None:
    expected = json.loads(path.read_text())
    for dtype in ("float32", "bfloat16", "fp8"):
        print(f"{dtype}: perplexity {perplexity(model, device='cuda', dtype=dtype):.4f}")
        same, gaps = 0, []
        for (tokens, _), (want, margins) in zip(answers(model, device="cuda", dtype=dtype), expected, strict=True):
            at = next((i for i, (a, b) in enumerate(zip(tokens, want, strict=True)) if a != b), None)
            same += at is None
            if at is not None:
                gaps.append(margins[at])
        print(f"{dtype}: {same} of {len(expected)} answers equal over {TOKENS} tokens; gap of the best two "
              f"log-probabilities where the others first differ: {[round(g, 4) for g in sorted(gaps)]}")  # fmt: skip


if __name__ == "__main__":
    mode, file, name = sys.argv[1:]
    if mode == "reference":
        Path(file).write_text(json.dumps(answers(name, device="cpu", dtype="float32")))
    else:
        compare(Path(file), name)
