"""Where the time goes on a GPU: kernels of a prefill step and of decode steps, host functions of a chat run.

python scripts/gpu_profile.py [fp8] [prefill] [decode] [prefix] [chat] [host]
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile

from quire.bench.offline import run_workload
from quire.bench.suite import DATA
from quire.bench.workloads import chat, fixed, shared_prefix
from quire.engine.link import open_link
from quire.kernels.triton import launch
from quire.types.config import EngineOptions

overlaps = launch.overlaps


def kernels(link, work, title: str) -> None:
    run_workload(link, work)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run = run_workload(link, work)
        torch.cuda.synchronize()
    events = [e for e in found.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events)
    print(f"== {title}: {run.seconds * 1e3:.2f} ms wall, {total / 1e3:.2f} ms of kernels, {run.stats.steps} steps")
    for e in events[:18]:
        print(f"  {e.self_device_time_total / 1e3:9.3f} ms {e.count:6d} x  {e.key[:110]}")


def host(link) -> None:
    run_workload(link, chat(1000, seed=1001))
    profiler = cProfile.Profile()
    began = time.perf_counter()
    profiler.enable()
    run = run_workload(link, chat(1000, seed=1))
    profiler.disable()
    print(f"== chat1000 under the profiler: {time.perf_counter() - began:.2f} s, {run.stats.steps} steps")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(32)


if __name__ == "__main__":
    flat = {"model": str(DATA / "llama-3.1-8b"), "random_weights": True, "device": "cuda", "max_model_len": 16384}
    wanted = sys.argv[1:] or ["prefill", "decode", "host"]
    if "fp8" in wanted:
        flat["dtype"] = "fp8"
    link = open_link(EngineOptions.of(**flat), process=False)
    if "launches" in wanted:
        for apart in (False, True):
            if apart:
                launch.overlaps = lambda device: False
            for size in (1, 32):
                link.core.executor.close()
                torch.cuda.empty_cache()
                link.core.executor.start()
                run_workload(link, fixed(size, 128, 64, seed=5))
                best = min(run_workload(link, fixed(size, 128, 64, seed=6 + i)).seconds for i in range(3))
                print(f"launches apart {apart}, {size} rows: {best / 64 * 1e3:.3f} ms a step")
            launch.overlaps = overlaps
    if "prefill" in wanted:
        kernels(link, fixed(1, 8192, 1, seed=5), "prefill 8192")
        kernels(link, fixed(1, 2048, 1, seed=5), "prefill 2048")
    if "decode" in wanted:
        kernels(link, fixed(1, 128, 32, seed=5), "decode 1 x 32")
        kernels(link, fixed(256, 128, 16, seed=5), "decode 256 x 16")
    if "prefix" in wanted:
        kernels(link, shared_prefix(256, 2048, 32, 32, seed=5), "prefix 256 x (2048 + 32)")
    if "chat" in wanted:
        kernels(link, chat(1000, seed=5), "chat1000")
    if "host" in wanted:
        host(link)
