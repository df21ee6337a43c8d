"""quantize: a plain checkpoint to a calibrated quantised one, with what it costs in perplexity."""

from __future__ import annotations

import json
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.options import JsonOption

if TYPE_CHECKING:
    from quire.assets import LocalModel


class SchemeName(StrEnum):
    AWQ = "awq"
    GPTQ = "gptq"
    SMOOTHQUANT = "smoothquant"
    FP8 = "fp8"


def register(app: typer.Typer) -> None:
    app.command()(quantize)


def quantize(
    model: Annotated[str, typer.Argument(help="folder or hub id of a plain safetensors checkpoint")],
    *,
    scheme: Annotated[SchemeName, typer.Option(help="awq and gptq: 4 bits; smoothquant: int8; fp8: e4m3 by channel")],
    out: Annotated[Path, typer.Option(help="folder to make")],
    text: Annotated[
        Path | None, typer.Option(help="file of text to calibrate with (default: what the model writes itself)")
    ] = None,
    eval_text: Annotated[
        Path | None,
        typer.Option(
            help="file whose perplexity is measured (default: the text's last fifth, or more of the model's own)"
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="windows of the text to calibrate with", min=1)] = 64,
    window: Annotated[int, typer.Option(help="tokens of a window", min=16)] = 512,
    eval_windows: Annotated[int, typer.Option(help="windows to measure perplexity on; 0: do not measure", min=0)] = 16,
    group_size: Annotated[int, typer.Option(min=1, help="4 bits: columns that share a scale; 128, 64 or 32")] = 128,
    act_order: Annotated[
        bool | None,
        typer.Option(
            "--act-order/--no-act-order", help="gptq: columns in the order of how much they matter (default: yes)"
        ),
    ] = None,
    alpha: Annotated[float, typer.Option(help="smoothquant: how much of the outliers goes into the weights")] = 0.5,
    keep: Annotated[str | None, typer.Option(help="pattern of modules that stay as they are: 'down_proj'")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    json_: JsonOption = None,
) -> None:
    """Quantise a checkpoint once, by what its layers see of a text; writes compressed-tensors safetensors."""
    from quire.assets import resolve
    from quire.model.calibration.quantize_checkpoint import quantize_checkpoint
    from quire.model.calibration.recipe import Recipe
    from quire.runtime.hardware import probe

    recipe = Recipe(scheme.value, group_size, act_order=act_order, alpha=alpha, keep=keep)
    local = resolve(model)
    hardware, began = probe(device), time.perf_counter()
    if text is None:
        parts = _own_text(model, hardware.device, samples + (0 if eval_text else eval_windows), window)
        parts, scored = parts[:samples], parts[samples:]
    else:
        parts, scored = _windows(local, text, window, held_out=0.0 if eval_text else 0.2)
    if eval_text is not None:
        scored, _ = _windows(local, eval_text, window)

    def progress(done: int, of: int) -> None:
        typer.echo(f"\r{scheme.value}: layer {done} of {of}", nl=done == of)

    report = quantize_checkpoint(
        local.open(), local.path, out, recipe, parts[:samples], device=hardware.device, progress=progress
    )
    figures: dict[str, Any] = {
        "scheme": scheme.value,
        "seconds": time.perf_counter() - began,
        "matrices": report.matrices,
        "stored_bytes": report.written_bytes,
        "source_bytes": report.source_bytes,
    }
    typer.echo(
        f"{report.matrices} matrices of {report.layers} layers, {report.source_bytes / 2**20:.1f} MiB to "
        f"{report.written_bytes / 2**20:.1f} MiB, in {figures['seconds']:.0f} s: {out}"
    )
    if eval_windows:
        figures["perplexity"] = _perplexities(model, out, hardware.device, scored[:eval_windows])
    if json_:
        json_.write_text(json.dumps(figures, indent=1))


def _windows(
    model: LocalModel, path: Path, window: int, held_out: float = 0.0
) -> tuple[list[list[int]], list[list[int]]]:
    """Of a file of text, and of its last part, which is held out."""
    from quire.bench.perplexity import read_text, windows
    from quire.text.text_model import load_tokenizer

    ids = load_tokenizer(model).encode(read_text(path))
    cut = len(ids) - int(len(ids) * held_out)
    return windows(ids[:cut], window), windows(ids[cut:], window)


def _own_text(model: str, device: str, samples: int, window: int) -> list[list[int]]:
    from quire.bench.own_text import own_text
    from quire.engine.llm import LLM

    typer.echo(f"the model writes {samples} samples of {window} tokens")
    with LLM(model, device=device, prefix_cache=False) as llm:
        return own_text(llm, samples, window)


def _perplexities(model: str, out: Path, device: str, parts: list[list[int]]) -> dict[str, float]:
    """Of the plain model, of the numbers written, and of these as this machine serves them by default."""
    from quire.bench.perplexity import perplexity
    from quire.engine.llm import LLM

    plain = {"dtype": "float32" if device == "cpu" else "bfloat16"}
    ways: dict[str, dict[str, Any]] = {
        "before": {"model": model, **plain},
        "after": {"model": str(out), **plain},
        "as served": {"model": str(out)},
    }
    found: dict[str, float] = {}
    for name, options in ways.items():
        with LLM(device=device, prefix_cache=False, **options) as llm:
            found[name] = perplexity(llm, parts).value
        change = found[name] / found["before"] - 1
        typer.echo(f"perplexity {name}: {found[name]:.4f}" + (f" ({change:+.2%})" if name != "before" else ""))
    return found
