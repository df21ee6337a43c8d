"""What beams cost: a search of W beams against W plain sequences over one prompt, in pages and in time per step."""

from __future__ import annotations

import statistics
import time

from quire.bench.workloads import fixed
from quire.engine.llm import LLM
from quire.types.beam import BeamParams
from quire.types.sampling_params import SamplingParams


def measure(llm: LLM, *, beams: int, prompt: int, out: int, rounds: int, seed: int = 1) -> dict[str, float]:
    """Medians over `rounds`, turn by turn. The prompt is in the cache for both, so that the steps are all decoding."""
    ((tokens, _),) = fixed(1, prompt, out, seed=seed, vocab=llm.info.vocab_size)
    plain = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
    search = BeamParams(beams=beams, max_tokens=out, ignore_eos=True)
    llm.reset()
    llm.generate(tokens, plain)
    alone = llm.stats().pages_peak
    llm.reset()
    llm.beam_search(tokens, search)
    shared = llm.stats().pages_peak
    times: dict[str, list[float]] = {"beams": [], "plain": []}
    for _ in range(rounds):
        began = time.perf_counter()
        llm.beam_search(tokens, search)
        middle = time.perf_counter()
        llm.generate([tokens] * beams, plain)
        times["beams"].append((middle - began) / out)
        times["plain"].append((time.perf_counter() - middle) / out)
    step, other = (statistics.median(times[kind]) for kind in ("beams", "plain"))
    return {
        "beams": beams,
        "pages_alone": alone,
        "pages_beams": shared,
        "step_ms": step * 1e3,
        "plain_step_ms": other * 1e3,
        "ratio": step / other,
    }


def rows(summary: dict[str, float]) -> list[tuple[str, str]]:
    many, one = summary["pages_beams"], summary["pages_alone"]
    return [
        ("pages", f"{many:.0f} for {summary['beams']:.0f} beams, {one:.0f} for one sequence"),
        ("a step of beams", f"{summary['step_ms']:.1f} ms"),
        ("of as many sequences", f"{summary['plain_step_ms']:.1f} ms"),
        ("ratio", f"{summary['ratio']:.2f}"),
    ]
