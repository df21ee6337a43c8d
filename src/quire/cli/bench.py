"""bench: measurements, each a command."""

from __future__ import annotations

import json
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import asdict

from quire.cli.bench_evict import evict
from quire.cli.bench_ladder import register as register_ladder
from quire.cli.bench_lora import lora
from quire.cli.bench_memory import register
from quire.cli.bench_needle import needle
from quire.cli.bench_perplexity import perplexity
from quire.cli.bench_products import products
from quire.cli.bench_sampling import sampling
from quire.cli.bench_serve import serve
from quire.cli.bench_simulation import register as register_simulation
from quire.cli.bench_spec import spec
from quire.cli.options import InOption, JsonOption, OutOption, PrefixOption, RoundsOption, with_engine_options
from quire.types.config import EngineOptions

if TYPE_CHECKING:
    from quire.bench.peer import Comparison, Jobs
    from quire.engine.link import Link
    from quire.types.messages import EngineInfo

app = typer.Typer(help="Measure an engine.", no_args_is_help=True)


class Workload(StrEnum):
    CHAT = "chat"
    FIXED = "fixed"
    SHARED_PREFIX = "shared_prefix"


class Peer(StrEnum):
    LLAMA_CPP = "llama-cpp"


class Requantise(StrEnum):
    NONE = "none"
    Q4_0 = "q4_0"
    Q8_0 = "q8_0"


PeerOption = Annotated[Peer | None, typer.Option(help="run the same work through this engine too, turn by turn")]
RequantiseOption = Annotated[
    Requantise, typer.Option(help="beside the file as shipped, let the peer have it requantised so")
]


@app.callback()
def _group() -> None:
    pass


def throughput(
    *,
    engine: EngineOptions,
    workload: Annotated[Workload, typer.Option(help="what is asked: see docs/bench.md")] = Workload.CHAT,
    num: Annotated[int, typer.Option(min=1, help="requests")] = 200,
    in_: InOption = 128,
    out: OutOption = 64,
    prefix: PrefixOption = 512,
    seed: Annotated[int, typer.Option(help="seed of the workload")] = 1,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="measured runs; medians count (default: 3 with a peer)")
    ] = None,
    peer: PeerOption = None,
    peer_requantise: RequantiseOption = Requantise.Q4_0,
    json_: JsonOption = None,
) -> None:
    """Submit a whole workload at once; report tokens per second, latencies and KV use."""
    from quire.bench import workloads
    from quire.bench.offline import run_workload
    from quire.bench.peer import medians
    from quire.bench.report import rows, summarise
    from quire.engine.link import open_link

    with closing(open_link(engine, process=False, progress=True)) as link:
        vocab = link.info.vocab_size
        if workload is Workload.CHAT:
            work = workloads.chat(num, seed=seed, vocab=vocab)
        elif workload is Workload.FIXED:
            work = workloads.fixed(num, in_, out, seed=seed, vocab=vocab)
        else:
            work = workloads.shared_prefix(num, prefix, in_, out, seed=seed, vocab=vocab)
        run_workload(link, workloads.fixed(2, 8, 2, seed=seed + 1, vocab=vocab))  # first-use costs, other tokens
        versus = None
        if peer is None:
            summary = medians([summarise(run_workload(link, work)) for _ in range(rounds or 1)])
        else:
            versus = _compare(engine, link, work, rounds or 3, peer_requantise)
            summary = versus.ours
        info = link.info
    _show(rows(summary), versus)
    if json_:
        settings = {"workload": str(workload), "num": num, "seed": seed, "engine": engine.flat()}
        _keep(json_, settings, info, summary, versus)


app.command()(with_engine_options(positional_model=False)(throughput))


def latency(
    *,
    engine: EngineOptions,
    in_: Annotated[int, typer.Option("--in", min=1, help="input tokens")] = 512,
    out: Annotated[int, typer.Option(min=1, help="output tokens")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="times the same prompt is answered")] = 3,
    seed: Annotated[int, typer.Option(help="seed of the prompt")] = 1,
    peer: PeerOption = None,
    peer_requantise: RequantiseOption = Requantise.Q4_0,
    json_: JsonOption = None,
) -> None:
    """Answer one prompt at a time; report the time to the first token and between tokens."""
    from quire.bench import workloads
    from quire.bench.latency import latencies, rows
    from quire.bench.offline import run_workload
    from quire.engine.link import open_link

    with closing(open_link(engine, process=False, progress=True)) as link:
        vocab = link.info.vocab_size
        work = workloads.fixed(1, in_, out, seed=seed, vocab=vocab)
        run_workload(link, workloads.fixed(1, in_, 4, seed=seed + 1, vocab=vocab))  # first-use costs, other tokens
        versus = None
        if peer is None:
            runs = [run_workload(link, work) for _ in range(repeats)]
        else:
            versus = _compare(engine, link, work, repeats, peer_requantise)
            runs = versus.runs
        summary, info = latencies(runs), link.info
    _show(rows(summary), versus)
    if json_:
        _keep(json_, {"seed": seed, "engine": engine.flat()}, info, summary, versus)


app.command()(with_engine_options(positional_model=False)(latency))


def _compare(engine: EngineOptions, link: Link, work: Jobs, rounds: int, requantise: Requantise) -> Comparison:
    """The same work here and there, with the same threads and as many streams at once."""
    from quire.assets import resolve
    from quire.bench.offline import run_workload
    from quire.bench.peer import LlamaCpp, compare
    from quire.runtime.hardware import probe
    from quire.runtime.hardware import resolve as decide

    decisions = decide(engine, probe(engine.device.device))
    model = resolve(engine.model.model)
    with LlamaCpp(model, requantise, threads=decisions.threads, streams=min(len(work), decisions.max_seqs)) as peer:
        return compare(lambda: run_workload(link, work), peer, work, rounds=rounds, share=engine.cache.prefix_cache)


def _show(lines: list[tuple[str, str]], versus: Comparison | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for line in lines:
        table.add_row(*line)
    Console().print(table)
    for text in versus.lines() if versus else ():
        typer.echo(text)


def _keep(
    path: Path, settings: dict[str, Any], info: EngineInfo, summary: dict[str, Any], versus: Comparison | None
) -> None:
    facts = {"model": info.model, "device": info.device, "dtype": info.dtype, "reasons": info.reasons}
    path.write_text(json.dumps({**settings, **facts, **summary, **(versus.plain() if versus else {})}, indent=1))


def interference(
    *,
    engine: EngineOptions,
    streams: Annotated[int, typer.Option(min=1, help="answers under way")] = 32,
    prompt: Annotated[
        int | None, typer.Option(help="tokens of the long prompt; its answer has one (default: the context but one)")
    ] = None,
    in_: Annotated[int, typer.Option("--in", min=1, help="input tokens of each stream")] = 128,
    out: Annotated[int, typer.Option(min=1, help="output tokens of each stream")] = 1024,
    json_: JsonOption = None,
) -> None:
    """Answer streams with and without one long prompt that arrives among them; report their gaps between tokens."""
    from quire.bench.interference import interference as measure
    from quire.engine.link import open_link

    with closing(open_link(engine, process=False, progress=True)) as link:
        size = link.info.max_model_len - 1 if prompt is None else prompt
        found = measure(link, streams=streams, prompt=size, n_in=in_, n_out=out)
        info = link.info
    lines = [
        (f"gap between tokens, {name}", "  ".join(f"{point} {1e3 * gap:.1f} ms" for point, gap in gaps.items()))
        for name, gaps in (("streams alone", found.alone), ("beside the long prompt", found.beside))
    ]
    _show([*lines, ("time to the long prompt's first token", f"{found.long_ttft:.2f} s")], None)
    if json_:
        _keep(json_, {"engine": engine.flat()}, info, asdict(found), None)


app.command()(with_engine_options(positional_model=False)(interference))


def structured(
    *,
    engine: EngineOptions,
    num: Annotated[int, typer.Option(min=1, help="schemas")] = 300,
    seed: Annotated[int, typer.Option(help="seed of the schemas")] = 1,
    rounds: RoundsOption = 1,
    json_: JsonOption = None,
) -> None:
    """Answer under JSON schemas and freely; report what a schema costs and which steps it saves."""
    from quire.bench.structured_output import measure, rows
    from quire.engine.llm import LLM

    with LLM(progress=True, **{"model": engine.model.model, **engine.flat()}) as llm:
        summary, info = measure(llm, num, seed=seed, rounds=rounds), llm.info
    _show(rows(summary), None)
    if json_:
        _keep(json_, {"seed": seed, "engine": engine.flat()}, info, summary, None)


app.command()(with_engine_options(positional_model=False)(structured))


def beams(
    *,
    engine: EngineOptions,
    width: Annotated[int, typer.Option(min=1, help="beams")] = 8,
    in_: Annotated[int, typer.Option("--in", min=1, help="prompt tokens")] = 1024,
    out: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = 32,
    rounds: RoundsOption = 3,
    json_: JsonOption = None,
) -> None:
    """Search with beams over a long prompt; report pages and the time of a step beside plain sequences'."""
    from quire.bench.branching import measure, rows
    from quire.engine.llm import LLM

    with LLM(progress=True, **{"model": engine.model.model, **engine.flat()}) as llm:
        summary, info = measure(llm, beams=width, prompt=in_, out=out, rounds=rounds), llm.info
    _show(rows(summary), None)
    if json_:
        _keep(json_, {"engine": engine.flat()}, info, summary, None)


app.command()(with_engine_options(positional_model=False)(beams))


def lang(
    *,
    engine: EngineOptions,
    branches: Annotated[int, typer.Option(min=1, help="thoughts at each level of the tree")] = 16,
    levels: Annotated[int, typer.Option(min=1, help="levels of the tree")] = 2,
    keep: Annotated[int, typer.Option(min=1, help="thoughts of a level to go on from")] = 4,
    thought: Annotated[int, typer.Option(min=1, help="tokens of a thought")] = 32,
    rounds: RoundsOption = 3,
    json_: JsonOption = None,
) -> None:
    """Run a tree of thoughts as a quire.lang program and as the plain HTTP calls it is made of; report seconds."""
    from quire.bench.lang import Shape, measure, rows

    summary = measure(engine, Shape(branches=branches, depth=levels, keep=keep, thought=thought), rounds)
    _show(rows(summary), None)
    if json_:
        json_.write_text(json.dumps({"engine": engine.flat(), **summary}, indent=1))


app.command()(with_engine_options(positional_model=False)(lang))


def suite(
    *,
    engine: EngineOptions,
    name: Annotated[str, typer.Argument(help="which suite: h200")] = "h200",
    only: Annotated[list[str] | None, typer.Option(help="run these workloads only; may be repeated")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="measured runs of each workload; the best counts")] = 1,
    verify: Annotated[int, typer.Option(help="answers of each workload to check against plain torch")] = 2,
    json_: JsonOption = None,
) -> None:
    """Run a fixed set of workloads and set each against other engines and the hardware's floor; unless another model is
    named, on the shape of Llama 3.1 8B with random weights, which wants a large GPU."""
    from quire.bench.suite_report import report_suite

    report_suite(engine, name, only=only, repeats=repeats, verify=verify, json_path=json_)


app.command()(with_engine_options(positional_model=False)(suite))
app.command()(serve)
app.command()(spec)
app.command()(evict)
app.command()(lora)
app.command()(sampling)
app.command()(perplexity)
app.command()(products)
app.command()(needle)
register(app)
register_simulation(app)
register_ladder(app)
