"""doctor: what this machine has, what would be chosen on it and why, and where the KV ceiling is."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Annotated, Any

import typer

from quire.cli.model_report import fit_figures, fit_rows, reading_headers, show_json, show_rows, size
from quire.cli.options import AsJson, with_engine_options
from quire.types.config import EngineOptions
from quire.types.installed import too_old
from quire.types.memory_use import described_limits

PACKAGES = ("quire", "torch", "triton", "tokenizers", "safetensors", "llguidance", "fastapi", "pyzmq")


def register(app: typer.Typer) -> None:
    app.command()(with_engine_options()(doctor))


def doctor(
    *,
    engine: EngineOptions,
    context: Annotated[int, typer.Option(min=1, help="tokens per sequence for the KV ceiling")] = 2048,
    json: AsJson = False,
) -> None:
    """Check this machine for a model: hardware, kernels chosen and why, how many sequences fit. Of a model that is not
    here, the headers are read and no weights fetched."""
    from quire import assets
    from quire.engine.build import check_preview
    from quire.runtime.model_fit import model_fit

    name = engine.model.model
    local = assets.present(name)
    with reading_headers(name):
        found = assets.preview(name) if local is None else None
    if found is None or found.source is None:
        source: Any = (local or assets.resolve(name)).open()
        fit: Any = model_fit(source, engine)
    else:
        source, fit = found.source, check_preview(found, engine)
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    limits = described_limits()
    packages = {package: _version(package) for package in PACKAGES} | too_old()
    lines = (*fit.decisions.reasons, *fit.decisions.idle, *fit.kernels)
    reasons = [(line.partition(": ")[0], line.partition(": ")[2]) for line in lines]
    if json:
        figures = {"name": name, "architecture": fit.spec.architecture, "parameters": fit.parameters}
        sequences = {"context_asked": context, "sequences": fit.sequences(context)}
        show_json({
            "system": machine, **limits, "packages": packages, "choices": reasons,
            "model": figures | fit_figures(fit) | sequences,
        })  # fmt: skip
        return
    show_rows("machine", [("system", machine), *limits.items()])
    show_rows("packages", [*packages.items()])
    show_rows("choices", reasons)
    show_rows(f"model {local.name if local is not None else name}", _model_rows(fit, engine, source, context))


def _model_rows(fit: Any, engine: EngineOptions, source: Any, context: int) -> list[tuple[str, str]]:
    spec, layout = fit.spec, fit.layout
    heads, layers = spec.attention.heads, f"{len(spec.layers)} layers"
    if spec.recurrent:
        layers = f"{len(spec.attending)} of {layers}; others keep a state of {size(layout.state_bytes)} a sequence"
    lasting = ""
    if layout.lasting_bytes != layout.token_bytes:
        lasting = f", {size(layout.lasting_bytes)} behind all windows"
    each = f", on each of {fit.ranks} ranks" if fit.ranks > 1 else ""
    in_all = f"{each}: {size(fit.kv_bytes)} in all" if each else ""
    first, *rest = fit_rows(fit, engine, source)
    rows = [
        first,
        ("attention", f"{heads} heads over {spec.kv_heads} KV heads of {spec.head_dim}, {layers}"),
        ("KV per token", f"{size(layout.token_bytes)} in {layout.dtype}{lasting}{each}"),
        *rest,
    ]
    if fit.fits:
        rows.append(("KV memory", f"{fit.pages - 1} pages of {size(layout.page_bytes)}{in_all}; {fit.why}"))
        rows.append(("ceiling", _ceiling(fit.sequences(context), fit.tokens, context)))
    return rows


def _ceiling(count: int, tokens: int, context: int) -> str:
    if not count:
        return f"no sequence of {context:,} tokens: {tokens:,} fit in all"
    return f"{count} sequence{'s' * (count > 1)} of {context} tokens ({tokens:,} tokens in all)"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
