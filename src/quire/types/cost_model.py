"""How long a step takes, as a sum over what is in it: the model that steps are budgeted by and simulated with.

    seconds = base + tokens + tokens beyond the knee + rows + decode context + prefill pairs + pairs with context
                                                                                                (each times its rate)

Below the knee a step reads all weights whatever it computes; beyond it, every token costs its products. Decode rows
read their context. Prefill rows attend to pairs of tokens: within the row, which dense kernels do, and with KV entries
of steps before, which are read from pages. Captured steps compute their padding, too. Rates are fitted to measured
steps (`quire bench calibrate`). Refuses to know: how they were measured, who asks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf
from pathlib import Path

import msgspec

from quire.types.errors import ConfigError
from quire.types.plan import Row, captured_size


class StepWork(msgspec.Struct, gc=False):
    """What is in a step."""

    tokens: int = 0
    rows: int = 0
    context: int = 0  # KV entries that decode rows read
    pairs: float = 0.0  # of tokens that attend and are attended to, within prefill rows
    context_pairs: float = 0.0  # of their tokens and KV entries that steps before computed


class Rates(msgspec.Struct, frozen=True):
    """Seconds of a step, and of each unit of what is in it."""

    base: float = 0.0
    tokens: float = 0.0
    beyond: float = 0.0  # the knee
    rows: float = 0.0
    context: float = 0.0
    pairs: float = 0.0
    context_pairs: float | None = None  # None: as `pairs`

    @property
    def context_pair(self) -> float:
        return self.pairs if self.context_pairs is None else self.context_pairs

    def seconds(self, work: StepWork, knee: int) -> float:
        """Of a step with this in it, padding included."""
        tokens = work.tokens
        return (
            self.base
            + self.tokens * tokens
            + (self.beyond * (tokens - knee) if tokens > knee else 0.0)
            + self.rows * work.rows
            + self.context * work.context
            + self.pairs * work.pairs
            + self.context_pair * work.context_pairs
        )


class Machine(msgspec.Struct, frozen=True):
    """What the device holds that the rates were measured on."""

    pages: int
    slots: int
    max_model_len: int
    max_batch_tokens: int
    depth: int
    page_size: int = 16
    step_target: float = 0.0
    captured: list[tuple[int, int]] = []  # (tokens, rows) that steps with rows of several tokens are padded to
    launch: float = 0.0  # seconds the host is busy launching a step with such rows that fits none of these


class CostModel(msgspec.Struct, frozen=True):
    device: str
    model: str
    source: str  # of the measurements
    knee: int
    rates: Rates
    machine: Machine
    error: dict[str, float] = {}  # of the fit, on steps that it did not see

    def seconds(self, work: StepWork) -> float:
        return self.rates.seconds(padded(work, self.machine.captured), self.knee)

    def launch_seconds(self, work: StepWork) -> float:
        """For which nothing else is planned, and no step that ends is noticed."""
        return 0.0 if fits_captured(work, self.machine.captured) else self.machine.launch


def fits_captured(work: StepWork, captured: Sequence[tuple[int, int]]) -> bool:
    """Whether a step is one launch, as those are whose rows have a token each."""
    return work.tokens <= work.rows or captured_size(captured, work.tokens, work.rows) is not None


def padded(work: StepWork, captured: Sequence[tuple[int, int]]) -> StepWork:
    """What is computed of a step, which may be captured in one of these sizes."""
    if work.tokens > work.rows and (size := captured_size(captured, work.tokens, work.rows)):
        return StepWork(size[0], work.rows, work.context, work.pairs, work.context_pairs)
    return work


def work_of(rows: Sequence[Row]) -> StepWork:
    decode = [row.start - row.shift for row in rows if row.count == 1]
    tokens, pairs, behind = len(decode), 0.0, 0.0
    if tokens < len(rows):
        for row in rows:
            if row.count > 1:
                tokens += row.count
                pairs += row.count * (row.count + 1) / 2
                behind += row.count * (row.start - row.shift)
    return StepWork(tokens, len(rows), sum(decode) + len(decode), pairs, behind)


_NOT_A_NUMBER = re.compile(rb'"(\w+)"\s*:\s*(-?(?:NaN|Infinity))\b')  # as other programs write them into JSON


def read_cost_model(path: Path) -> CostModel:
    try:
        text = path.read_bytes()
        if found := _NOT_A_NUMBER.search(text):
            raise ConfigError(f"the cost model {path}: {found[1].decode()} must be a number, got {found[2].decode()}")
        model = msgspec.json.decode(text, type=CostModel)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read the cost model {path}: {error}") from None
    if problem := _problem(model):
        raise ConfigError(f"the cost model {path}: {problem}")
    return model


def _problem(model: CostModel) -> str:
    """Which field has a value that no device has; nothing if none has."""
    machine, rates = model.machine, msgspec.structs.asdict(model.rates)
    for name in ("pages", "slots", "max_model_len", "max_batch_tokens", "depth", "page_size"):
        if (count := getattr(machine, name)) < 1:
            return f"machine.{name} must be at least 1, got {count}"
    times = {"knee": model.knee, "machine.step_target": machine.step_target, "machine.launch": machine.launch}
    for name, value in times.items():
        if not 0 <= value < inf:
            return f"{name} must be a finite number and not negative, got {value:g}"
    for name, value in rates.items():
        if value is not None and not 0 <= value < inf:
            return f"rates.{name} must be a finite number and not negative, got {value:g}"
    if not any(rates.values()):
        return "rates are all 0: steps would take no time"
    if bad := [size for size in machine.captured if min(size) < 1]:
        return f"machine.captured must be tokens and rows of at least 1, got {list(bad[0])}"
    return ""


def write_cost_model(path: Path, model: CostModel) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(model), indent=1) + b"\n")
