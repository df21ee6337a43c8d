"""One workload through the history of serving engines: each rung is an engine as its time had it, and adds one idea.

    recompute ─► KV cache ─► static batches ─► iteration-level batches over contiguous memory (maximum, power of two,
    oracle) ─► pages ─► chunked prefill ─► prefix cache ─► quantised weights and KV ─► speculation

All rungs have the same bytes of KV memory and, up to the quantised one, give the same tokens. What was computed is
counted, not claimed: `computed_tokens` are token rows that went through the model. Refuses to know: who prints it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from random import Random
from typing import Any

import msgspec

from quire.bench.html_report import bar_chart, html_page, html_table, stacked
from quire.bench.offline import Run, Trace, run_workload, stats_of
from quire.bench.report import percentile
from quire.bench.workloads import Job, fixed
from quire.engine.link import Link, LocalLink, open_link
from quire.types.config import EngineOptions
from quire.types.errors import from_wire
from quire.types.messages import Events, Reset, Submit
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

LONGEST = 256  # tokens that a request may have at most
POOL = 4  # requests of that length that KV memory holds
WHOLE_STEP = 4096  # prompt tokens of a step that takes prompts whole


class Rung(msgspec.Struct, frozen=True):
    name: str
    adds: str
    claim: str  # what papers say it brings
    options: dict[str, Any] = {}  # on top of those of the rung below


RUNGS = (
    Rung("recompute", "every token is computed from all tokens before it, again for each", "", {"max_seqs": 1}),
    Rung("kv-cache", "keys and values of earlier tokens are kept", "", {}),
    Rung(
        "static",
        "a batch of requests together, memory padded to the longest; the next batch when all have ended",
        "",
        {"max_seqs": 16, "scheduler": "static"},
    ),
    Rung(
        "iteration-max",
        "requests join and leave at every step; contiguous memory for the longest that may be",
        "Orca: up to 36.9x FasterTransformer (GPT-3 175B)",
        {"scheduler": "quire.bench.reservations:Maximum"},
    ),
    Rung(
        "iteration-pow2",
        "contiguous memory for a power of two",
        "",
        {"scheduler": "quire.bench.reservations:PowerOfTwo"},
    ),
    Rung(
        "iteration-oracle",
        "contiguous memory for exactly what it will become, if that were known",
        "vLLM: before paging 20 to 38% of KV memory held tokens",
        {"scheduler": "quire.bench.reservations:Oracle"},
    ),
    Rung("paged", "memory in pages, taken as they are needed", "vLLM: 2 to 4x Orca", {"scheduler": "fcfs"}),
    Rung(
        "chunked-prefill",
        "long prompts a part at a time, beside the answers under way",
        "Sarathi-Serve: 2.6x (Mistral-7B) to 5.6x (Falcon-180B) capacity at a latency target",
        {"max_batch_tokens": 64},
    ),
    Rung("prefix-cache", "equal beginnings are computed once", "SGLang: up to 6.4x", {"prefix_cache": True}),
    Rung(
        "quantised",
        "weights and KV in few bits: less to read, more tokens in the same memory (and the compiled decoder)",
        "KIVI: 2.35 to 3.47x by KV alone",
        {"dtype": "auto", "kv_dtype": "int8"},
    ),
    Rung(
        "speculation",
        "tokens are guessed from the context and checked together",
        "Leviathan et al.: 2 to 3x",
        {"speculation": "ngram"},
    ),
)
HEAD = ("rung", "tok/s", "x", "TTFT p50", "ITL p50 ms", "p99 ms", "computed / needed", "steps", "KV filled")
BASE = {
    "max_model_len": LONGEST,
    "max_batch_tokens": WHOLE_STEP,
    "step_target": 0.0,
    "prefix_cache": False,
    "scheduler": "fcfs",
    "dtype": "float32",
}


def ladder_workload(num: int, *, seed: int, vocab: int) -> list[Job]:
    """Prompts that share their first 40 tokens, go on with 8 to 100 of their own, and repeat some; answers of 4 to 32.
    As traffic does, it asks for far less than the longest that may be."""
    rng = Random(seed)
    head = fixed(1, 40, 1, seed=seed, vocab=vocab)[0].prompt
    jobs = []
    for i in range(num):
        own = fixed(1, rng.randint(8, 100), 1, seed=seed + 1 + i, vocab=vocab)[0].prompt
        jobs.append(Job([*head, *own, *own[:8]], rng.randint(4, 32)))
    return jobs


def climb_ladder(
    options: EngineOptions,
    num: int,
    *,
    seed: int = 1,
    rungs: Sequence[str] = (),
    told: Callable[[dict[str, Any]], None] = lambda figures: None,
) -> dict[str, Any]:
    """Run the workload on these rungs, or on all, in order; `told`: of each as it is done."""
    found: list[dict[str, Any]] = []
    changes: dict[str, Any] = dict(BASE)
    memory, first = 0, list[list[int]]()
    for rung in RUNGS:
        changes |= rung.options
        if rungs and rung.name not in rungs:
            continue
        size = options.cache.page_size
        room = {"kv_memory": str(memory)} if memory else {"kv_pages": POOL * -(-LONGEST // size)}
        with closing(open_link(options.but(**changes, **room), process=False)) as link:
            assert isinstance(link, LocalLink)
            pool = link.core.scheduler.memory
            memory = memory or pool.pool.total * pool.layout.page_bytes
            work = ladder_workload(num, seed=seed, vocab=link.info.vocab_size)
            run_workload(link, fixed(2, 8, 2, seed=9, vocab=link.info.vocab_size))
            run = recompute(link, work) if rung.name == "recompute" else run_workload(link, work)
            one = _figures(rung, run, link, len(work))
        tokens = [trace.tokens for trace in run.traces]
        first = first or tokens
        one["same_tokens"] = tokens == first
        one["factor"] = one["output_tok_s"] / found[-1]["output_tok_s"] if found else 1.0
        found.append(one)
        told(one)
    return {"requests": num, "kv_bytes": memory, "longest": LONGEST, "rungs": found}


def recompute(link: Link, work: Sequence[Job]) -> Run:
    """Without a KV cache: one request after the other, and for every token a prompt of all before it."""
    link.send(Reset())
    traces, began = [], time.perf_counter()
    for prompt, length in work:
        trace = Trace(prompt=len(prompt), tokens=[], times=[])
        for _ in range(length):
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            request = Request(id="recompute", prompt=[*prompt, *trace.tokens], params=params, arrival=time.time())
            link.send(Submit(request))
            trace.tokens.append(_one_token(link))
            trace.times.append(time.perf_counter() - began)
        trace.end = trace.times[-1]
        traces.append(trace)
    return Run(seconds=time.perf_counter() - began, traces=traces, stats=stats_of(link), peak_memory=0)


def _one_token(link: Link) -> int:
    token = -1
    while True:
        for message in link.receive(None):
            for event in message.events if isinstance(message, Events) else ():
                if event.error:
                    raise from_wire(event.error, event.message)
                token = event.tokens[0] if event.tokens else token
                if event.finish is not None:
                    return token


def _figures(rung: Rung, run: Run, link: LocalLink, requests: int) -> dict[str, Any]:
    stats, memory = run.stats, link.core.scheduler.memory
    prompts, outputs = sum(trace.prompt for trace in run.traces), sum(len(trace.tokens) for trace in run.traces)
    ttft, gaps = [trace.ttft for trace in run.traces], [gap for trace in run.traces for gap in trace.gaps]
    filled = memory.slots_filled / memory.slots_allocated if memory.slots_allocated else 1.0
    return {
        "name": rung.name,
        "adds": rung.adds,
        "claim": rung.claim,
        "seconds": run.seconds,
        "output_tok_s": outputs / run.seconds,
        "ttft_s": {f"p{p}": percentile(ttft, p) for p in (50, 99)},
        "itl_s": {f"p{p}": percentile(gaps, p) for p in (50, 99)},
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "computed_tokens": stats.rows,
        "needed_tokens": prompts + outputs - requests,  # each once; the last of an answer is not computed
        "cached_tokens": stats.cached_tokens,
        "steps": stats.steps,
        "kv_filled": filled,  # of the KV memory that requests had, what held tokens when they ended
        "kv_pages": memory.pool.total,
        "preemptions": stats.preemptions,
    }


def counted_charts(found: dict[str, Any]) -> list[str]:
    """What does not depend on how busy the machine is."""
    rungs = found["rungs"]
    rows = [(one["name"], one["computed_tokens"] / one["needed_tokens"]) for one in rungs]
    return [
        bar_chart("steps", "times that all weights are read", [(one["name"], one["steps"]) for one in rungs]),
        bar_chart("computed for each token that was needed", "token rows", rows, log=True),
        bar_chart("KV memory that held no token", "share", [(one["name"], 1 - one["kv_filled"]) for one in rungs]),
    ]


def ladder_svg(found: dict[str, Any]) -> str:
    return stacked(counted_charts(found))


def ladder_html(found: dict[str, Any]) -> str:
    rungs = found["rungs"]
    charts = [
        bar_chart("output", "tokens per second", [(one["name"], one["output_tok_s"]) for one in rungs], log=True),
        bar_chart("time to first token, median", "s", [(one["name"], one["ttft_s"]["p50"]) for one in rungs]),
        bar_chart("gap between tokens, p99", "s", [(one["name"], one["itl_s"]["p99"]) for one in rungs]),
        *counted_charts(found),
    ]
    told = [("rung", "adds", "papers say")] + [(one["name"], one["adds"], one["claim"]) for one in rungs]
    return html_page("The ladder", [html_table(ladder_rows(found)), *charts, html_table(told)])


def ladder_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    return [HEAD, *map(ladder_row, found["rungs"])]


def ladder_row(one: dict[str, Any]) -> tuple[str, ...]:
    return (
        one["name"],
        f"{one['output_tok_s']:.1f}",
        f"{one['factor']:.2f}",
        f"{one['ttft_s']['p50']:.2f} s",
        f"{one['itl_s']['p50'] * 1000:.0f}",
        f"{one['itl_s']['p99'] * 1000:.0f}",
        f"{one['computed_tokens']:,} / {one['needed_tokens']:,}",
        f"{one['steps']:,}",
        f"{one['kv_filled']:.0%}",
    )
