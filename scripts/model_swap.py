"""What it takes to swap between two models of which one fits, stage by stage, and to have a killed engine back, with a
spare process and without.

    python scripts/model_swap.py [MODEL [OTHER]] [--rounds N]

A swap is from the request for the model that is not loaded to its first token: the other's end, spawn and imports
(unless a spare has done them), weights, KV pages, warm-up, the request itself. A restart is from the engine's death by
SIGKILL to the first token of its successor.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import statistics
import time
from contextlib import suppress

from quire.engine.client import AsyncClient, RestartPolicy
from quire.engine.frontend import Frontend
from quire.engine.open_pool import open_model_pool
from quire.types.config import EngineOptions
from quire.types.errors import EngineDeadError
from quire.types.models_file import ServedModel
from quire.types.sampling_params import SamplingParams
from quire.types.serving import ServeOptions

SPARE_S = 15.0  # that a spare has to be ready before it is needed
PROMPT = "The capital of France is"
STAGE = re.compile(r"([a-zA-Z ]+) ([\d.]+) s")


async def first_token(frontend: Frontend) -> None:
    await frontend.collect(frontend.prepare(PROMPT, SamplingParams(temperature=0, max_tokens=1)))


async def restart(frontend: Frontend, spare: bool) -> float:
    """Seconds until an engine that was killed answers again."""
    client = frontend.client
    assert isinstance(client, AsyncClient) and client.pid is not None
    await asyncio.sleep(SPARE_S if spare else 0)
    began = time.perf_counter()
    os.kill(client.pid, signal.SIGKILL)
    while True:
        with suppress(EngineDeadError):
            await first_token(frontend)
            return time.perf_counter() - began
        await asyncio.sleep(0.01)


async def swaps(models: list[ServedModel], rounds: int, *, spare: bool) -> list[dict[str, float]]:
    """Seconds of each stage of each swap."""
    options = ServeOptions(models="models.yaml", max_loaded_models=1, spare_engine=spare)
    pool = await open_model_pool(models, options, RestartPolicy(max_restarts=1))
    found = []
    try:
        for number in range(rounds):
            name = models[1 - number % 2].name
            await asyncio.sleep(SPARE_S if spare else 0)
            began = time.perf_counter()
            lease = await pool.acquire(name)
            loaded = time.perf_counter()
            await first_token(lease.frontend)
            ended = time.perf_counter()
            load_s = next(state.load_s for state in pool.states() if state.name == name)
            reasons = lease.frontend.client.info.reasons[-1].removeprefix("start-up: ")
            stages = {stage.strip(): float(seconds) for stage, seconds in STAGE.findall(reasons)}
            if spare:
                del stages["imports"]
            found.append(
                {"unload": loaded - began - load_s, "load": load_s}
                | {f"  {stage}": seconds for stage, seconds in stages.items()}
                | {"request": ended - loaded, "swap": ended - began, "restart": await restart(lease.frontend, spare)}
            )
            lease.release()
    finally:
        await pool.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2-135m"])
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    names = [args.models[0], args.models[-1]]
    models = [
        ServedModel(f"{name} {number}", EngineOptions.of(model=name, kv_memory="256M", max_model_len=2048))
        for number, name in enumerate(names)
    ]
    for spare in (False, True):
        found = asyncio.run(swaps(models, args.rounds, spare=spare))
        print(f"medians of {len(found)} swaps, {'with a spare process' if spare else 'without a spare'}:")
        for stage in found[0]:
            print(f"  {stage:<14} {statistics.median(each[stage] for each in found):6.2f} s")


if __name__ == "__main__":
    main()
