"""quantize: a plain checkpoint to a calibrated quantised one, with what it costs in perplexity."""

from __future__ import annotations

import json
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.options import JsonOption


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
    text: Annotated[Path, typer.Option(help="file of text to calibrate with")],
    out: Annotated[Path, typer.Option(help="folder to make")],
    eval_text: Annotated[
        Path | None, typer.Option(help="file whose perplexity is measured (default: the last fifth of the text)")
    ] = None,
    samples: Annotated[int, typer.Option(help="windows of the text to calibrate with", min=1)] = 64,
    window: Annotated[int, typer.Option(help="tokens of a window", min=16)] = 512,
    eval_windows: Annotated[int, typer.Option(help="windows to measure perplexity on; 0: do not measure", min=0)] = 16,
    group_size: Annotated[int, typer.Option(min=1, help="4 bits: columns that share a scale; 128, 64 or 32")] = 128,
    act_order: Annotated[bool, typer.Option(help="gptq: columns in the order of how much they matter")] = False,
    alpha: Annotated[float, typer.Option(help="smoothquant: how much of the outliers goes into the weights")] = 0.5,
    keep: Annotated[str | None, typer.Option(help="pattern of modules that stay as they are: 'down_proj'")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    json_: JsonOption = None,
) -> None:
    """Quantise a checkpoint once, by what its layers see of a text; writes compressed-tensors safetensors."""
    from quire.assets import resolve
    from quire.bench.perplexity import read_text, windows
    from quire.model.calibration.quantize_checkpoint import quantize_checkpoint
    from quire.model.calibration.recipe import Recipe
    from quire.runtime.hardware import probe
    from quire.text.text_model import load_tokenizer

    recipe = Recipe(scheme.value, group_size, act_order=act_order, alpha=alpha, keep=keep)
    local = resolve(model)
    tokenizer = load_tokenizer(local)
    ids = tokenizer.encode(read_text(text))
    if eval_text is None:
        ids, scored = ids[: -(len(ids) // 5)] or ids, ids[-(len(ids) // 5) :]
    else:
        scored = tokenizer.encode(read_text(eval_text))
    began = time.perf_counter()
    hardware = probe(device)

    def progress(done: int, of: int) -> None:
        typer.echo(f"\r{scheme.value}: layer {done} of {of}", nl=done == of)

    report = quantize_checkpoint(
        local.open(), local.path, out, recipe, windows(ids, window, samples), device=hardware.device, progress=progress
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
        figures["perplexity"] = _perplexities(model, out, hardware.device, windows(scored, window, eval_windows))
    if json_:
        json_.write_text(json.dumps(figures, indent=1))


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
