"""Against a peer: the same token-level work through llama.cpp and through us, turn by turn, and the ratios.

The peer is taken at its best: the file as shipped and requantised, each with fused attention and without, its cells in
one buffer or one per stream, whichever was faster in a trial. Each figure is compared with the best of these variants,
even when no single one is best at all. Refuses to know: how either engine works.
"""

from __future__ import annotations

import importlib.metadata
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire.assets import LocalModel
from quire.assets.store import cache_dir
from quire.bench.offline import Run, Trace
from quire.bench.peer_llama import Answer, Load, Quantise, Work
from quire.bench.report import speeds, summarise
from quire.types.errors import ConfigError, QuireError

Jobs = Sequence[tuple[list[int], int]]

NAME = "llama-cpp"
SHIPPED = "as shipped"
UNFUSED = ", unfused attention"
TRIAL = 16  # output tokens of each stream in the trial

# Figure → (how it is shown, whether more is better)
FIGURES: dict[str, tuple[str, bool]] = {
    "output_tok_s": ("output tok/s", True),
    "decode_tok_s": ("decode tok/s", True),
    "prefill_tok_s": ("prefill tok/s", True),
    "ttft_p50_s": ("TTFT s", False),
    "itl_p50_s": ("time per token s", False),
}


class Variant(msgspec.Struct):
    """One way to run the peer."""

    path: str
    flash: bool
    unified: bool = True


class LlamaCpp:
    """The peer's process, and the ways to run it, by label."""

    def __init__(self, model: LocalModel, requantise: str, *, threads: int, streams: int):
        if model.kind != "gguf":
            raise ConfigError(f"llama.cpp reads GGUF files and {model.name} is not one; choose a GGUF model")
        try:
            importlib.metadata.version("llama-cpp-python")
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(
                "the peer llama-cpp needs the package llama-cpp-python; install it built for this machine: "
                'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python'
            ) from None
        self._threads, self._streams = threads, streams
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "quire.bench.peer_llama"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.about = self._answer().about
        files = {SHIPPED: model.path}
        if requantise != "none":
            files[requantise] = self._requantised(model, requantise)
        self.variants = {
            label + ("" if flash else UNFUSED): Variant(str(path), flash)
            for label, path in files.items()
            for flash in (True, False)
        }
        self._loaded: Load | None = None

    def tune(self, jobs: Jobs, prefix: int) -> None:
        """For each variant, one buffer of cells or one per stream: what the trial says."""
        trial = [(prompt, min(length, TRIAL)) for prompt, length in jobs[: self._streams]]
        for label, variant in self.variants.items() if len(trial) > 1 else ():
            seconds = {}
            for unified in (True, False):
                variant.unified = unified
                seconds[unified] = self.run(label, trial, prefix).seconds
            variant.unified = min(seconds, key=seconds.__getitem__)

    def run(self, label: str, jobs: Jobs, prefix: int) -> Answer:
        variant = self.variants[label]
        wanted = Load(
            model=variant.path,
            threads=self._threads,
            streams=min(self._streams, len(jobs)),
            length=max(len(prompt) + length for prompt, length in jobs),
            unified=variant.unified,
            flash=variant.flash,
        )
        if wanted != self._loaded:
            self._ask(wanted)
            self._loaded = wanted
            self._ask(Work([(jobs[0][0][:256], 4)]))  # first-use costs
        return self._ask(Work([(list(prompt), length) for prompt, length in jobs], prefix))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _requantised(self, model: LocalModel, kind: str) -> Path:
        """Made once, kept in the cache; a source that changed is another file."""
        facts = model.path.stat()
        path = cache_dir() / "peer" / f"{model.path.stem}-{facts.st_size}-{int(facts.st_mtime)}.{kind}.gguf"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._ask(Quantise(str(model.path), str(path), kind))
        return path

    def _ask(self, message: Quantise | Load | Work) -> Answer:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the missing answer says it
        return self._answer()

    def _answer(self) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            hint = " (an illegal instruction: its build does not fit this CPU)" if code == -4 else ""
            raise QuireError(f"llama.cpp ended with exit code {code}{hint}; reinstall llama-cpp-python or omit --peer")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error:
            self.close()
            raise QuireError(answer.error)
        return answer


class Comparison(msgspec.Struct):
    """Medians over rounds, and what they came from."""

    ours: dict[str, Any]
    runs: list[Run]
    rounds: list[dict[str, Any]]
    peer: dict[str, Any]  # label → its median and rounds
    about: str
    ratios: dict[str, float]
    same_first_token: float  # share of streams on which both drew the same token first

    def lines(self) -> list[str]:
        """One a figure, each with its ratio."""
        found = []
        for figure, ratio in self.ratios.items():
            theirs = "; ".join(f"{label} {_shown(entry['median'][figure])}" for label, entry in self.peer.items())
            ours = _shown(figures(self.ours)[figure])
            found.append(f"{FIGURES[figure][0]:18} quire {ours}  llama.cpp {theirs}  ratio {ratio:.2f}")
        return found

    def plain(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "peer": {"name": NAME, "about": self.about, "variants": self.peer},
            "ratios": self.ratios,
            "same_first_token": self.same_first_token,
        }


def compare(run: Callable[[], Run], peer: LlamaCpp, jobs: Jobs, *, rounds: int, share: bool) -> Comparison:
    """We, then each of the peer's variants, and again; `share`: the peer too computes a common prefix once."""
    prefix = common_prefix(jobs) if share else 0
    peer.tune(jobs, prefix)
    ours: list[Run] = []
    theirs: dict[str, list[Answer]] = {label: [] for label in peer.variants}
    for _ in range(rounds):
        ours.append(run())
        for label, answers in theirs.items():
            answers.append(peer.run(label, jobs, prefix))
    summaries = [summarise(r) for r in ours]
    entries = {
        label: _entry([figures(speeds(a.traces, a.seconds)) for a in answers], peer.variants[label])
        for label, answers in theirs.items()
    }
    middle = medians(summaries)
    return Comparison(
        ours=middle,
        runs=ours,
        rounds=summaries,
        peer=entries,
        about=peer.about,
        ratios=ratios(figures(middle), [entry["median"] for entry in entries.values()]),
        same_first_token=_agreement(ours[0].traces, theirs[SHIPPED][0].traces),
    )


def common_prefix(jobs: Jobs) -> int:
    """Tokens that all prompts begin with, leaving each at least one of its own."""
    if len(jobs) < 2:
        return 0
    prompts = [prompt for prompt, _ in jobs]
    shared = 0
    for tokens in zip(*prompts, strict=False):
        if len(set(tokens)) > 1:
            break
        shared += 1
    return min(shared, min(map(len, prompts)) - 1)


def figures(found: dict[str, Any]) -> dict[str, float | None]:
    """The figures compared, of a summary or of speeds."""
    return {
        "output_tok_s": found["output_tok_s"],
        "decode_tok_s": found["decode_tok_s"],
        "prefill_tok_s": found["prefill_tok_s"],
        "ttft_p50_s": found["ttft_s"]["p50"],
        "itl_p50_s": found["itl_s"]["p50"],
    }


def ratios(ours: dict[str, float | None], theirs: list[dict[str, float | None]]) -> dict[str, float]:
    """Above 1 we are better, whichever way a figure goes; against the peer's best."""
    found = {}
    for figure, (_, more) in FIGURES.items():
        mine = ours[figure]
        values = [value for entry in theirs if (value := entry[figure])]
        if mine and values:
            found[figure] = mine / max(values) if more else min(values) / mine
    return found


def medians(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Figure by figure, through nested tables; what was never measured stays None."""
    found: dict[str, Any] = {}
    for key, first in entries[0].items():
        values = [entry[key] for entry in entries]
        if isinstance(first, dict):
            found[key] = medians(values)
        else:
            there = [value for value in values if value is not None]
            found[key] = statistics.median(there) if there else None
    return found


def _entry(measured: list[dict[str, Any]], variant: Variant) -> dict[str, Any]:
    return {
        "one_buffer": variant.unified,
        "fused_attention": variant.flash,
        "median": medians(measured),
        "rounds": measured,
    }


def _agreement(ours: list[Trace], theirs: list[Trace]) -> float:
    return sum(a.tokens[0] == b.tokens[0] for a, b in zip(ours, theirs, strict=True)) / len(ours)


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value >= 10 else f"{value:.4f}"
