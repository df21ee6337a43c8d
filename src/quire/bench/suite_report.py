"""`quire bench suite`: start the suite's model, run every workload, print and keep the table."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from quire.bench.offline import run_workload
from quire.bench.suite import DATA, Result, Work, anchors, run_suite
from quire.bench.verify import Agreement, agreement
from quire.bench.workloads import H200, fixed
from quire.engine.gc_control import settle
from quire.engine.link import LocalLink, open_link
from quire.model.blocks.linear import Linear
from quire.types.config import EngineOptions, ModelOptions
from quire.types.errors import ConfigError

PEAK_FLOPS = 989e12  # dense bf16, H200 datasheet
PEAK_BYTES = 4.8e12
MAX_LEN = 16384  # every workload fits


def report_suite(
    options: EngineOptions, name: str, *, only: list[str] | None, repeats: int, verify: int, json_path: Path | None
) -> None:
    if not (DATA / f"{name}.json").is_file():
        raise ConfigError(f"no suite is called {name!r}; there is: h200")
    console = Console(width=140)
    table = anchors(name)
    asked = options.model
    if asked == ModelOptions(dtype=asked.dtype, quantize=asked.quantize):
        model = dataclasses.replace(asked, model=str(DATA / table["model"]), random_weights=True, max_model_len=MAX_LEN)
        options = dataclasses.replace(options, model=model)
    began = time.perf_counter()
    link = open_link(options, process=False)
    assert isinstance(link, LocalLink)
    run_workload(link, fixed(1, 128, 1, seed=3))
    settle()  # as an engine process does
    startup = time.perf_counter() - began
    report: dict[str, Any] = {"device": link.info.device, "startup_s": startup, "workloads": {}}
    console.print(f"start to first token {startup:.1f} s  {table['startup_s']}")
    for reason in link.info.reasons:
        console.print("  " + reason, style="dim")
    work = work_of(link)
    for result in run_suite(link, name, work, only=only, repeats=repeats):
        checked = check(link, result, verify)
        console.print(line(result, checked), highlight=False)
        report["workloads"][result.name] = {
            "s": result.seconds,
            **result.anchors,
            "mfu": result.flops / PEAK_FLOPS,
            "bandwidth": result.bytes / PEAK_BYTES,
            "steps": result.run.stats.steps,
            "checked": checked.tokens,
            "equal": checked.equal,
            "worst": checked.worst,
            "unchecked": checked.unchecked,
        }
    link.close()
    if json_path:
        json_path.write_text(json.dumps(report, indent=1))


def work_of(link: LocalLink) -> Work:
    executor: Any = link.core.executor
    model, layout = executor.model, executor.layout
    spec = model.spec
    tensors = [t for name, m in model.modules().items() if name != "embed" for t in m.tensors().values()]
    return Work(
        matrix_parameters=sum(sum(m.parts) * m.columns for m in model.modules().values() if isinstance(m, Linear)),
        weight_bytes=sum(t.nbytes for t in tensors),
        kv_bytes=layout.token_bytes,
        attention_flops=sum(4 * mixer.heads * mixer.head_dim for mixer in spec.attending.values()),
    )


def check(link: LocalLink, result: Result, count: int) -> Agreement:
    """Some of the workload's answers, run again in plain torch on the same weights."""
    executor: Any = link.core.executor
    jobs = H200[result.name]()
    answers = [(list(job.prompt), trace.tokens) for job, trace in zip(jobs, result.run.traces, strict=True)]
    step = max(1, len(answers) // max(1, count))
    return agreement(executor.model, executor.layout, answers[::step][:count])


def line(result: Result, checked: Agreement) -> str:
    a, s = result.anchors, result.seconds
    verdict = "goal" if s <= a["goal"] else "ahead" if s < min(a["vllm"], a["sglang"]) else "BEHIND"
    missed = f", no memory to check {checked.unchecked}" if checked.unchecked else ""
    return (
        f"{result.name:18} {s:8.3f} s  vLLM {a['vllm']:7.3f}  SGLang {a['sglang']:7.3f}  floor {a['floor']:7.3f}  "
        f"goal {a['goal']:7.3f}  {verdict:6}  MFU {result.flops / PEAK_FLOPS:4.0%}  "
        f"bandwidth {result.bytes / PEAK_BYTES:4.0%}  {checked.equal}/{checked.tokens} as plain{missed}"
    )
