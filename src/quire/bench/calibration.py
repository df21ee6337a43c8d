"""Calibrate: run steps of all kinds on a device, note how long each took, and fit the cost model to them.

A step takes from the end of the one before it, or from when it was planned where none was in flight: what callers wait
for, host time included. They are fitted to a few in a row at a time; every fifth of these is left out of the fit, and
says how far off it is. Refuses to know: the simulator.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from random import Random
from statistics import median

from quire.bench import workloads
from quire.bench.offline import run_workload
from quire.bench.workloads import Job, Workload
from quire.engine.link import LocalLink
from quire.scheduling import SchedulingFeature
from quire.scheduling.plan_builder import PlanBuilder
from quire.simulation.cost_fit import Measured, errors, fit
from quire.types.cost_model import CostModel, Machine, StepWork, fits_captured, padded, work_of
from quire.types.errors import ConfigError
from quire.types.plan import StepResult

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PROMPTS = (16, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
CONTEXTS = (512, 2048, 8192)
SEVERAL_STEPS = 4
LOADS = (4, 16, 64, 256)  # requests at a time
MAX_OUTPUTS = 64
TOGETHER = 8  # steps in a row, fitted to as one: single ones are noticed late where the next is being launched
HELD_OUT = 5  # one in so many of these is not fitted to
OUTLIER = 2.0  # times the prediction, or as many times less: something else happened
TRIM_ROUNDS = 2


class StepTimes(SchedulingFeature):
    """Of every step that lands, what was in it, padding included, and how long it took; of those too large for
    what is captured, how long launching took."""

    def __init__(self, captured: Sequence[tuple[int, int]]) -> None:
        self.steps: list[tuple[StepWork, float]] = []
        self.launches: list[float] = []
        self._captured = captured
        self._last = 0.0

    def step_landed(self, step: PlanBuilder, result: StepResult) -> None:
        now = time.monotonic()
        took, self._last = now - (step.now if step.idle else self._last), now
        plan = step.plan
        if plan.rows and not (plan.probes or plan.transfers or any(row.drafts for row in plan.rows)):
            work = work_of(plan.rows)
            self.steps.append((padded(work, self._captured), took))
            if self._captured and not fits_captured(work, self._captured):
                self.launches.append(result.launch_seconds)


def calibrate(link: LocalLink, *, longest: int, most: int, rounds: int, seed: int = 1) -> CostModel:
    """Prompts of up to `longest` tokens, up to `most` sequences at once."""
    core = link.core
    run_workload(link, workloads.fixed(2, 32, 4, seed=seed, vocab=link.info.vocab_size))  # first-use costs
    while core.executor.idle(quiet=True):
        pass  # steps are measured as they are once a start's work is done
    times = StepTimes(core.capacity.captured)
    core.scheduler.sequences.register(*core.scheduler.sequences.features, times)
    longest, most = min(longest, core.capacity.longest - 40), min(most, core.capacity.slots)
    for number in range(rounds):
        for work, concurrency in probes(link, longest, most, seed + 1000 * number):
            run_workload(link, work, concurrency=concurrency)
    return fitted(link, times.steps, median(times.launches) if times.launches else 0.0)


def probes(link: LocalLink, longest: int, most: int, seed: int) -> Iterator[tuple[Workload, int]]:
    """Decoding at every batch size and over contexts, prompts of every size, and both at once; all at once, or so many
    at a time."""
    vocab = link.info.vocab_size
    for work in single_kinds(link, longest, most, seed):
        yield work, 0
    for concurrency in LOADS:
        if concurrency <= most:
            for work in sustained(concurrency, longest, seed, vocab):
                yield work, concurrency


def sustained(concurrency: int, longest: int, seed: int, vocab: int) -> Iterator[Workload]:
    """Prompts that arrive as others end: chat, and lengths from a few tokens to the `longest`, as many of each size as
    of its double."""
    count = 2 * concurrency + 16
    chat = workloads.chat(count, seed=seed, vocab=vocab)
    yield [Job(job.prompt[:longest], min(job.output_len, MAX_OUTPUTS)) for job in chat]
    rng = Random(seed)
    lengths = [(round(longest ** rng.random()), rng.randint(1, MAX_OUTPUTS)) for _ in range(count)]
    yield [workloads.fixed(1, prompt, out, seed=rng.getrandbits(32), vocab=vocab)[0] for prompt, out in lengths]


def single_kinds(link: LocalLink, longest: int, most: int, seed: int) -> Iterator[Workload]:
    capacity, vocab = link.core.capacity, link.info.vocab_size
    room = (capacity.pages - 1) * link.info.page_size

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
    yield fixed(1, min(SEVERAL_STEPS * longest, capacity.longest - 40, room // 2), 2)  # whose steps attend to context
    yield [*fixed(min(16, most), 64, 60), Job(fixed(1, longest, 1)[0].prompt, 4)]


def fitted(link: LocalLink, steps: Sequence[tuple[StepWork, float]], launch: float) -> CostModel:
    measured = [_together(steps[at : at + TOGETHER]) for at in range(0, len(steps), TOGETHER)]
    seen = [one for number, one in enumerate(measured) if number % HELD_OUT]
    unseen = measured[::HELD_OUT]
    if not unseen:
        raise ConfigError("no step was measured")
    knee, rates = fit(seen)
    for _ in range(TRIM_ROUNDS):
        kept = [one for one in seen if 1 / OUTLIER < one.seconds / max(one.predicted(knee, rates), 1e-9) < OUTLIER]
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
        captured=list(capacity.captured),
        launch=launch,
    )
    model, source = f"{info.model}, {info.dtype}", f"quire bench calibrate: {len(steps)} steps on {info.device}"
    return CostModel(info.device, model, source, knee, rates, machine, errors(unseen, knee, rates))


def _together(steps: Sequence[tuple[StepWork, float]]) -> Measured:
    return Measured([work for work, _ in steps], sum(seconds for _, seconds in steps))


def rows(model: CostModel) -> list[tuple[str, str]]:
    """The model as (what, figure) lines."""
    rates, error, launch = model.rates, model.error, model.machine.launch
    return [
        ("device", f"{model.device}: {model.model}"),
        ("a step", f"{1e3 * rates.base:.3f} ms"),
        ("a token", f"{1e6 * rates.tokens:.2f} us, beyond {model.knee} in a step {1e6 * rates.beyond:.2f} us more"),
        ("a sequence", f"{1e6 * rates.rows:.2f} us"),
        ("decode context", f"{1e9 * rates.context:.2f} ns a KV entry"),
        ("prefill attention", f"{1e9 * rates.pairs:.3f} ns a pair, {1e9 * rates.context_pair:.3f} with context"),
        *([("launch", f"{1e3 * launch:.0f} ms of a step that is not captured")] if launch else []),
        ("error", f"median {error['median']:.1%}, p90 {error['p90']:.1%}, of all together {error['total']:+.1%}"),
    ]
