"""Calibrate: run steps of all kinds on a device, note how long each took, and fit the cost model to them.

A step takes from the end of the one before it, or from when it was planned where none was in flight: what callers wait
for, host time included. Every fifth is left out of the fit, and says how far off it is. Refuses to know: the simulator.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from quire.bench import workloads
from quire.bench.offline import run_workload
from quire.bench.workloads import Job, Workload
from quire.engine.link import LocalLink
from quire.scheduling import SchedulingFeature
from quire.scheduling.plan_builder import PlanBuilder
from quire.simulation.cost_fit import Measured, errors, fit
from quire.types.cost_model import CostModel, Machine, Rates, work_of
from quire.types.errors import ConfigError
from quire.types.plan import StepResult

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PROMPTS = (16, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
CONTEXTS = (512, 2048, 8192)
HELD_OUT = 5  # one step in so many is not fitted to
OUTLIER = 2.0  # times the prediction, or as many times less: something else happened
TRIM_ROUNDS = 2


class StepTimes(SchedulingFeature):
    """Of every step that lands, what was in it and how long it took."""

    def __init__(self) -> None:
        self.measured: list[Measured] = []
        self._last = 0.0

    def step_landed(self, step: PlanBuilder, result: StepResult) -> None:
        now = time.monotonic()
        took, self._last = now - (step.now if step.idle else self._last), now
        plan = step.plan
        if plan.rows and not (plan.probes or plan.transfers or any(row.drafts for row in plan.rows)):
            self.measured.append(Measured(work_of(plan.rows), took))


def calibrate(link: LocalLink, *, longest: int, most: int, rounds: int, seed: int = 1) -> CostModel:
    """Prompts of up to `longest` tokens, up to `most` sequences at once."""
    core, times = link.core, StepTimes()
    core.scheduler.sequences.register(*core.scheduler.sequences.features, times)
    vocab = link.info.vocab_size
    run_workload(link, workloads.fixed(2, 32, 4, seed=seed, vocab=vocab))  # first-use costs
    times.measured.clear()
    for number in range(rounds):
        for work in probes(link, longest, most, seed + 1000 * number):
            run_workload(link, work)
    return fitted(link, times.measured)


def probes(link: LocalLink, longest: int, most: int, seed: int) -> Iterator[Workload]:
    """Decoding at every batch size and over contexts, prompts of every size, and both at once."""
    capacity, vocab = link.core.capacity, link.info.vocab_size
    longest = min(longest, capacity.longest - 40)
    room = (capacity.pages - 1) * link.info.page_size
    most = min(most, capacity.slots)

    def fixed(count: int, prompt: int, out: int) -> Workload:
        return workloads.fixed(count, prompt, out, seed=seed + 17 * count + prompt, vocab=vocab)

    for prompt in PROMPTS:
        if prompt <= longest:
            yield fixed(1, prompt, 2)
    for batch in BATCHES:
        if batch <= most:
            yield fixed(batch, 32, 20)
    for context in CONTEXTS:
        for batch in (1, 8, 32):
            if context <= longest and batch <= most and batch * (context + 32) <= room // 2:
                yield fixed(batch, context, 12)
    long = Job(fixed(1, longest, 1)[0].prompt, 4)
    yield [*fixed(min(16, most), 64, 60), long]
    chat = workloads.chat(min(2 * most, 128), seed=seed, vocab=vocab)
    yield [Job(job.prompt[:longest], min(job.output_len, 80)) for job in chat]


def fitted(link: LocalLink, measured: list[Measured]) -> CostModel:
    seen = [one for number, one in enumerate(measured) if number % HELD_OUT]
    unseen = measured[::HELD_OUT]
    if not unseen:
        raise ConfigError("no step was measured")
    knee, rates = fit(seen)
    for _ in range(TRIM_ROUNDS):
        kept = [one for one in seen if 1 / OUTLIER < one.seconds / max(_predicted(one, knee, rates), 1e-9) < OUTLIER]
        knee, rates = fit(kept if len(kept) > len(seen) // 2 else seen)
    capacity, info = link.core.capacity, link.info
    machine = Machine(
        pages=capacity.pages - 1,
        slots=capacity.slots,
        max_model_len=capacity.longest,
        max_batch_tokens=capacity.max_batch_tokens,
        depth=capacity.depth,
        page_size=info.page_size,
        step_target=capacity.step_target,
    )
    model, source = f"{info.model}, {info.dtype}", f"quire bench calibrate: {len(measured)} steps on {info.device}"
    return CostModel(info.device, model, source, knee, rates, machine, errors(unseen, knee, rates))


def _predicted(one: Measured, knee: int, rates: Rates) -> float:
    return CostModel("", "", "", knee, rates, Machine(0, 0, 0, 0, 0)).seconds(one.work)


def rows(model: CostModel) -> list[tuple[str, str]]:
    """The model as (what, figure) lines."""
    rates, error = model.rates, model.error
    return [
        ("device", f"{model.device}: {model.model}"),
        ("a step", f"{1e3 * rates.base:.3f} ms"),
        ("a token", f"{1e6 * rates.tokens:.2f} us, beyond {model.knee} in a step {1e6 * rates.beyond:.2f} us more"),
        ("a sequence", f"{1e6 * rates.rows:.2f} us"),
        ("decode context", f"{1e9 * rates.context:.2f} ns a KV entry"),
        ("prefill attention", f"{1e9 * rates.pairs:.3f} ns a pair"),
        ("error", f"median {error['median']:.1%}, p90 {error['p90']:.1%}, of all together {error['total']:+.1%}"),
    ]
