"""How long a plan takes with 100, 10,000 and 100,000 requests waiting: `python scripts/planning_time.py`.

No model and no device: the scheduler itself, over the fake executor. Requests run, finish and are replaced at a steady
rate. How long an answer becomes shows in nothing that a policy sees, so that every figure has the same work in it
besides the queue: one that could choose short answers would admit more in a step, the more there are to choose from.
"""

from __future__ import annotations

import argparse
import statistics
import time

from quire.scheduling import Scheduler
from quire.types.config import SchedulerOptions
from quire.types.fakes import FakeExecutor
from quire.types.kv import KVGroup, KVLayout
from quire.types.plan import Capacity
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

LAYOUT = KVLayout((KVGroup(layers=(0,), tokens_per_page=16, kv_heads=1, head_dim=1),), "float32")
SLOTS, PROMPT, ANSWER = 64, 32, 64
VOCABULARY = 1024
STOPS = list(range(VOCABULARY // 16))  # one token in so many ends an answer


def measure(policy: str, waiting: int, steps: int) -> float:
    """Median seconds of this process in a plan and its commit."""
    capacity = Capacity(pages=SLOTS * 8, slots=SLOTS, max_model_len=128, max_batch_tokens=512, depth=1)
    options = SchedulerOptions(scheduler=policy, max_waiting=waiting + 2 * SLOTS)
    scheduler = Scheduler(options, LAYOUT, capacity)
    executor = FakeExecutor(LAYOUT, capacity, vocab=VOCABULARY)
    count = 0

    def submit() -> None:
        nonlocal count
        prompt = [count % 97, *range(PROMPT - 1)]
        params = SamplingParams(max_tokens=ANSWER, seed=count, stop_token_ids=STOPS)
        scheduler.submit(Request(id=str(count), prompt=prompt, params=params, arrival=count * 1e-3))
        count += 1

    for _ in range(waiting + SLOTS):
        submit()
    took = []
    for step in range(steps):
        while len(scheduler.sequences.waiting) < waiting:
            submit()
        began = time.process_time()
        plan = scheduler.plan(float(step))
        planned = time.process_time() - began
        assert plan is not None
        result = executor.submit(plan).result()
        began = time.process_time()
        scheduler.commit(plan, result, step + 0.5)
        took.append(planned + time.process_time() - began)
    return statistics.median(took[steps // 10 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheduler", default="fcfs")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    sizes = (100, 10_000, 100_000)
    best = {size: float("inf") for size in sizes}
    for _ in range(arguments.rounds):  # interleaved: a busy machine is busy for all of them
        for size in sizes:
            best[size] = min(best[size], measure(arguments.scheduler, size, arguments.steps))
    for size in sizes:
        print(f"{size:>7} waiting: {best[size] * 1e6:7.1f} us a step, {best[size] / best[sizes[0]]:.2f}x")


if __name__ == "__main__":
    main()
