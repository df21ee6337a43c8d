"""What it takes to swap between two models of which one fits, stage by stage, and to have a killed engine back, with a
spare process and without.

    python scripts/model_swap.py [MODEL [OTHER]] [--rounds N] [--asleep SIZE [--wait SECONDS]] [--checkpoint FOLDER]

    python scripts/model_swap.py --checkpoint /tmp/8b --asleep 40GiB     the shape of Llama 3.1 8B: writes 16 GB once,
                                                                         takes a GPU where there is one

A swap is from the request for the model that is not loaded to its first token: the other's end, spawn and imports
(unless a spare has done them), weights, KV pages, warm-up, the request itself. A restart is from the engine's death by
SIGKILL to the first token of its successor. With --asleep engines sleep instead of ending, and a swap is the other's
sleep, the wake, and the request; an engine's first sleep locks memory and takes longer.
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
from itertools import count
from pathlib import Path

from restart_time import first_token, write_checkpoint
from tokenizers import Tokenizer
from tokenizers.models import BPE

from quire.engine.client import AsyncClient, RestartPolicy
from quire.engine.frontend import Frontend
from quire.engine.open_pool import open_model_pool
from quire.types.config import EngineOptions
from quire.types.errors import EngineDeadError
from quire.types.models_file import ServedModel
from quire.types.serving import ServeOptions

FIRST_SLEEPS = 2  # swaps, with one of each engine
SPARE_S = 15.0  # that a spare has to be ready before it is needed
STAGE = re.compile(r"([a-zA-Z ]+) ([\d.]+) s")


NUMBERS = count()  # of requests


async def ask(frontend: Frontend) -> None:
    assert isinstance(frontend.client, AsyncClient)
    await first_token(frontend.client, f"request {next(NUMBERS)}")


async def restart(frontend: Frontend, spare: bool) -> float:
    """Seconds until an engine that was killed answers again."""
    client = frontend.client
    assert isinstance(client, AsyncClient) and client.pid is not None
    await asyncio.sleep(SPARE_S if spare else 0)
    began = time.perf_counter()
    os.kill(client.pid, signal.SIGKILL)
    while True:
        with suppress(EngineDeadError):
            await ask(frontend)
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
            await ask(lease.frontend)
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


async def sleeping_swaps(models: list[ServedModel], rounds: int, size: str, wait: float) -> list[dict[str, float]]:
    """Seconds of each stage of each swap. `wait`: before each, in which an engine captures more steps."""
    options = ServeOptions(models="models.yaml", max_loaded_models=1, models_asleep=size)
    pool = await open_model_pool(models, options, RestartPolicy(max_restarts=1))
    found = []
    try:
        for number in range(rounds):
            name = models[1 - number % 2].name
            await asyncio.sleep(wait)
            began = time.perf_counter()
            lease = await pool.acquire(name)
            loaded = time.perf_counter()
            await ask(lease.frontend)
            ended = time.perf_counter()
            lease.release()
            load_s = next(state.load_s for state in pool.states() if state.name == name)
            stages = {"the other's sleep": loaded - began - load_s, "load" if number == 0 else "wake": load_s}
            found.append(stages | {"request": ended - loaded, "swap": ended - began})
    finally:
        await pool.close()
    return found


def print_sleeping(found: list[dict[str, float]]) -> None:
    for number, stages in enumerate(found):
        print(f"swap {number}: " + ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in stages.items()))
    if later := found[FIRST_SLEEPS:]:
        print(f"medians of {len(later)} swaps after the first sleep of each:")
        for stage in later[0]:
            print(f"  {stage:<18} {statistics.median(each[stage] for each in later):6.2f} s")


def checkpoint_options(folder: Path) -> EngineOptions:
    """Of the shape of Llama 3.1 8B, written if it is not there, with a tokenizer that nobody asks for text."""
    if not folder.exists():
        write_checkpoint(folder)
    Tokenizer(BPE(vocab={chr(code): code for code in range(256)}, merges=[])).save(str(folder / "tokenizer.json"))
    return EngineOptions.of(model=str(folder), kv_memory="20GiB", max_model_len=16384)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2-135m"])
    parser.add_argument("--checkpoint", type=Path, help="folder of random weights of the shape of Llama 3.1 8B")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--asleep", help="host memory for engines that sleep, such as 40GiB")
    parser.add_argument("--wait", type=float, default=5.0, help="with --asleep: seconds before each swap")
    args = parser.parse_args()
    names = [args.models[0], args.models[-1]]
    options = [EngineOptions.of(model=name, kv_memory="256M", max_model_len=2048) for name in names]
    if args.checkpoint is not None:
        names, options = ["8b", "8b"], [checkpoint_options(args.checkpoint)] * 2
    models = [ServedModel(f"{name} {number}", options[number]) for number, name in enumerate(names)]
    if args.asleep is not None:
        print_sleeping(asyncio.run(sleeping_swaps(models, args.rounds, args.asleep, args.wait)))
        return
    for spare in (False, True):
        found = asyncio.run(swaps(models, args.rounds, spare=spare))
        print(f"medians of {len(found)} swaps, {'with a spare process' if spare else 'without a spare'}:")
        for stage in found[0]:
            print(f"  {stage:<14} {statistics.median(each[stage] for each in found):6.2f} s")


if __name__ == "__main__":
    main()
