"""doctor: what this machine has, what would be chosen on it and why, and where the KV ceiling is."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from quire.cli.options import with_engine_options
from quire.types.config import EngineOptions

PACKAGES = ("quire", "torch", "triton", "tokenizers", "safetensors", "llguidance", "fastapi", "pyzmq")


def register(app: typer.Typer) -> None:
    app.command()(with_engine_options()(doctor))


def doctor(
    *,
    engine: EngineOptions,
    context: Annotated[int, typer.Option(help="tokens per sequence for the KV ceiling")] = 2048,
) -> None:
    """Check this machine for a model: hardware, kernels chosen and why, how many sequences fit."""
    import torch

    from quire.assets import resolve
    from quire.kernels import cpu
    from quire.model import CompiledModel, compiled_refusal, packed_bytes, parameter_count, read_spec, resident_bytes
    from quire.model.blocks.fused import choose_stages
    from quire.model.quantization.dense_scheme import DenseScheme
    from quire.model.quantization.fp8 import Fp8Scheme
    from quire.runtime.capacity import kv_capacity, kv_layout, working_memory
    from quire.runtime.hardware import DTYPES, probe
    from quire.runtime.hardware import resolve as decide

    hardware = probe(engine.device.device)
    decisions = decide(engine, hardware)
    local = resolve(engine.model.model)
    spec = read_spec(local.open())
    dtype = DTYPES[decisions.dtype]
    source, device = local.open(), torch.device(decisions.device)
    refused = (
        "dtype was chosen"
        if engine.model.dtype != "auto"
        else compiled_refusal(source, device, random_weights=engine.model.random_weights, quantize=decisions.quantize)
    )
    if refused is None:
        weights, kinds = packed_bytes(source, decisions.quantize), CompiledModel.kv_kinds
        own = CompiledModel.kv_dtype
        kernels = [f"decoder: compiled ({', '.join(cpu.features())}), weights in 8 bits or as they are quantised"]
    else:
        stages, own = choose_stages(spec, device), decisions.dtype
        weights = resident_bytes(source, device, dtype, decisions.quantize)
        kinds = (own, *stages.kv_kinds)
        scheme = Fp8Scheme() if decisions.fp8 else DenseScheme()
        kernels = [f"decoder: not the compiled one, {refused}", *stages.describe(scheme)]
    layout = kv_layout(engine, decisions, spec, own, kinds)
    working = working_memory(engine, decisions, spec, layout, hardware.memory - weights)
    pages, why = kv_capacity(engine, hardware, layout, slots=decisions.max_seqs, working=working, taken=weights)
    tokens = (pages - 1) * engine.cache.page_size // len(layout.groups)
    heads, layers = spec.attention.heads, f"{len(spec.layers)} layers"
    if spec.recurrent:
        layers = f"{len(spec.attending)} of {layers}; others keep a state of {_size(layout.state_bytes)} a sequence"
    _section("machine", [("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}")])
    _section("packages", [(name, _version(name)) for name in PACKAGES])
    _section(
        "choices",
        [(r.partition(": ")[0], r.partition(": ")[2]) for r in (*decisions.reasons, *decisions.idle, *kernels)],
    )
    _section(
        f"model {local.name}",
        [
            ("architecture", f"{spec.architecture}, {parameter_count(spec):,} parameters"),
            ("attention", f"{heads} heads over {spec.kv_heads} KV heads of {spec.head_dim}, {layers}"),
            ("weights", _size(weights)),
            ("KV per token", f"{_size(layout.token_bytes)} in {layout.dtype}"),
            *_ceiling(pages, layout.page_bytes, why, tokens, context, weights, hardware.memory),
        ],
    )


def _ceiling(
    pages: int, page_bytes: int, why: str, tokens: int, context: int, weights: int, memory: int
) -> list[tuple[str, str]]:
    """How many sequences fit, or why none does."""
    if pages < 2:
        smaller = "a smaller dtype, a quantised GGUF of it or a smaller model would"
        cure = smaller if weights > memory else "raise kv_memory"
        return [("does not fit", f"{_size(weights)} of weights, {_size(memory)} of memory free; {cure}")]
    return [
        ("KV memory", f"{pages - 1} pages of {_size(page_bytes)}; {why}"),
        ("ceiling", f"{tokens // context} sequences of {context} tokens ({tokens:,} tokens in all)"),
    ]


def _section(title: str, rows: list[tuple[str, Any]]) -> None:
    console = Console()
    console.print(f"[bold]{title}[/bold]")
    table = Table.grid(padding=(0, 2))
    for key, value in rows:
        table.add_row("  " + key, str(value))
    console.print(table)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
