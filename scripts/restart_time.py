"""What it takes until an engine that was killed gives a token again, stage by stage: with a process of its own, with a
spare, and with a spare and held weights.

    python scripts/restart_time.py [MODEL] [--checkpoint FOLDER] [--rounds N] [--wait SECONDS] [--options JSON]

    python scripts/restart_time.py --checkpoint /tmp/8b      the shape of Llama 3.1 8B: writes 16 GB once, takes a GPU
                                                             where there is one

A restart is from SIGKILL to the first token of the successor: the death is noticed, the successor is told to start, its
own stages, the request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from quire.bench.suite import DATA
from quire.engine import client as engine_client
from quire.engine.client import AsyncClient, RestartPolicy
from quire.engine.spare_process import SpareProcess
from quire.engine.weight_holder import WeightHolder
from quire.types.config import EngineOptions
from quire.types.errors import EngineDeadError
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

SHAPE = DATA / "llama-3.1-8b"
STAGE = re.compile(r"([a-zA-Z ]+) ([\d.]+) s")
PROMPT = list(range(1, 9))


def write_checkpoint(folder: Path) -> None:
    """Random bf16 weights of that shape; their numbers repeat."""
    folder.mkdir(parents=True)
    shutil.copy(SHAPE / "config.json", folder)
    config = json.loads((SHAPE / "config.json").read_text())
    hidden, inner, vocabulary = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        within = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in within.items()}
    shapes |= {"model.norm": (hidden,), "lm_head": (vocabulary, hidden)}
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randn(1 << 24, generator=generator) * 0.02).bfloat16().view(torch.uint8).numpy().tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while (left := end + 8 + len(text) - file.tell()) > 0:
            file.write(numbers[:left])


async def first_token(client: AsyncClient, name: str) -> None:
    request = Request(id=name, prompt=PROMPT, params=SamplingParams(temperature=0, max_tokens=1))
    async for events in client.submit(request):
        if events[-1].error:
            raise EngineDeadError(events[-1].message)


async def restart(client: AsyncClient, name: str) -> dict[str, float]:
    """Seconds of each stage, once the engine is killed."""
    assert client.pid is not None
    before, began = client.restarts, time.perf_counter()
    os.kill(client.pid, signal.SIGKILL)
    while client.alive:
        await asyncio.sleep(0.001)
    noticed = time.perf_counter()
    while client.restarts == before:
        await asyncio.sleep(0.001)
    ready = time.perf_counter()
    await first_token(client, name)
    ended = time.perf_counter()
    told = client.info.reasons[-1].removeprefix("start-up: ")
    stages = {stage.strip(): float(seconds) for stage, seconds in STAGE.findall(told)}
    if "(ahead)" in told:
        del stages["imports"]
    return (
        {"death noticed": noticed - began, "successor ready": ready - noticed}
        | {f"  {stage}": seconds for stage, seconds in stages.items()}
        | {"  pause before it": engine_client.FIRST_BACKOFF_S}
        | {"  spawn, headers, link": ready - noticed - sum(stages.values()) - engine_client.FIRST_BACKOFF_S}
        | {"request": ended - ready, "first token again": ended - began}
    )


async def measure(options: EngineOptions, rounds: int, wait: float, *, spare: bool, hold: bool) -> None:
    holder = WeightHolder(1 << 40) if hold else None
    ahead = SpareProcess(delay=0, holder=holder) if spare else None
    policy = RestartPolicy(max_restarts=1)
    began = time.perf_counter()
    client = await AsyncClient.open(options, policy=policy, spare=ahead, holder=holder)
    print(f"\n{'with' if spare else 'without'} a spare, {'held' if hold else 'loaded'} weights; started in "
          f"{time.perf_counter() - began:.2f} s")  # fmt: skip
    print(*(f"  {reason}" for reason in client.info.reasons if "weights" in reason), sep="\n")
    found = []
    try:
        for number in range(rounds):
            engine_client.RESTART_WINDOW_S = 0.0  # each is the first, and waits no longer than that
            if ahead is not None:
                ahead.prepare()
            await first_token(client, f"before {number}")
            await asyncio.sleep(wait if spare else 0)
            with suppress(EngineDeadError):
                found.append(await restart(client, f"after {number}"))
        print(*(f"  {reason}" for reason in client.info.reasons if "weights" in reason), sep="\n")
    finally:
        await client.close()
        for each in (ahead, holder):
            if each is not None:
                each.close()
    print(f"medians of {len(found)} restarts:")
    for stage in dict.fromkeys(stage for each in found for stage in each):
        print(f"  {stage:<24} {statistics.median(each.get(stage, 0.0) for each in found):6.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--checkpoint", type=Path, help="folder of random weights of the shape of Llama 3.1 8B")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wait", type=float, default=15.0, help="seconds that a spare has to be ready")
    parser.add_argument("--options", type=json.loads, default={}, help="other options of the engine")
    args = parser.parse_args()
    flat: dict[str, Any] = {"model": args.model}
    if args.checkpoint is not None:
        if not args.checkpoint.exists():
            write_checkpoint(args.checkpoint)
        flat = {"model": str(args.checkpoint), "max_model_len": 16384}
    options = EngineOptions.of(**flat | args.options)
    for spare, hold in ((False, False), (True, False), (True, True)):
        asyncio.run(measure(options, args.rounds, args.wait, spare=spare, hold=hold))


if __name__ == "__main__":
    main()
