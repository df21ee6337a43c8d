"""One look at the engine on a GPU: exactness against the CPU on a tiny model, then speed on the 8B shape.

python scripts/gpu_smoke.py [tiny] [sampled] [big] [sleep]
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

from quire.bench.offline import run_workload
from quire.bench.report import rows, summarise
from quire.bench.sampling_bench import FORMS
from quire.bench.suite import DATA
from quire.bench.workloads import fixed
from quire.engine.link import open_link
from quire.generation.sampling import sampler
from quire.types.config import EngineOptions

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


def tiny() -> None:
    """Greedy tokens with graphs on and off, overlap on and off, alone and batched, are the same."""
    rng = random.Random(0)
    work = [([rng.randrange(1000) for _ in range(rng.randint(1, 300))], 24) for _ in range(40)]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY))
        found = {}
        for name, options in {
            "plain": {"graphs": False, "depth": 1},
            "overlap": {"graphs": False, "depth": 2},
            "graphs": {"depth": 1},
            "both": {},
            "chunks": {"prefill_chunk": 37},
            "invariant": {"invariant": True},
            "inv+chunk": {"invariant": True, "prefill_chunk": 37},
            "kv fp8": {"kv_dtype": "fp8"},
            "kv int8": {"kv_dtype": "int8"},
            "kv kivi": {"kv_dtype": "int8-kivi"},
        }.items():
            for dtype in ("float32", "bfloat16"):
                flat = {"model": folder, "random_weights": True, "dtype": dtype, "device": "cuda", "kv_memory": "1G"}
                began = time.perf_counter()
                link = open_link(EngineOptions.of(**flat, **options), process=False)
                started = time.perf_counter() - began
                together = [t.tokens for t in run_workload(link, work).traces]
                alone = [run_workload(link, [job]).traces[0].tokens for job in work[:6]]
                found[name, dtype] = together
                link.core.scheduler.check()
                link.close()
                same = sum(a == b for a, b in zip(together, found["plain", dtype], strict=True))
                lonely = sum(a == b for a, b in zip(alone, together, strict=False))
                print(f"{name:8} {dtype:9} start {started:5.1f} s  {same}/40 as plain, {lonely}/6 alone as batched")


def sampled() -> None:
    """Drawn tokens with graphs on and off are those of plain torch, in float32, whatever the way of sampling."""
    rng = random.Random(1)
    work = [([rng.randrange(1000) for _ in range(rng.randint(1, 100))], rng.randint(4, 24)) for _ in range(300)]
    kernels, found = sampler.why_not, {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY))
        for name, options in {"torch": {"graphs": False}, "launched": {"graphs": False}, "graphs": {}}.items():
            sampler.why_not = (lambda device: "compared with torch") if name == "torch" else kernels
            flat = {"model": folder, "random_weights": True, "dtype": "float32", "device": "cuda", "kv_memory": "1G"}
            link = open_link(EngineOptions.of(**flat, **options), process=False)
            for form, sampling in FORMS.items():
                tokens = [trace.tokens for trace in run_workload(link, work, sampling=sampling).traces]
                found[name, form] = tokens
                same = sum(a == b for a, b in zip(tokens, found["torch", form], strict=True))
                print(f"{name:8} {form:12} {same}/300 as torch draws")
            link.close()


def big() -> None:
    began = time.perf_counter()
    flat = {"model": str(DATA / "llama-3.1-8b"), "random_weights": True, "device": "cuda", "max_model_len": 16384}
    link = open_link(EngineOptions.of(**flat), process=False)
    print(f"start {time.perf_counter() - began:.1f} s", *link.info.reasons, sep="\n  ")
    for n, n_in, n_out in ((1, 128, 128), (32, 128, 128), (256, 128, 128), (1, 8192, 1), (1, 512, 1)):
        run_workload(link, fixed(n, n_in, n_out, seed=5))
        summary = summarise(run_workload(link, fixed(n, n_in, n_out, seed=6)))
        print(n, n_in, n_out, *(f"{a}: {b}" for a, b in rows(summary)[:5]), sep="\n    ")
    print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most")


def sleep() -> None:
    """Memory of the GPU given back and taken again; the same answer before and after, its prefix still cached."""
    flat = {"model": str(DATA / "llama-3.1-8b"), "random_weights": True, "device": "cuda", "max_model_len": 16384}
    link = open_link(EngineOptions.of(**flat), process=False)
    work = fixed(4, 256, 16, seed=5)
    run_workload(link, work)
    link.core.reset = lambda: None  # keep the cache
    before = [t.tokens for t in run_workload(link, work).traces]
    for asleep in (True, False):
        began = time.perf_counter()
        link.core.power(asleep=asleep)
        free, total = torch.cuda.mem_get_info()
        seconds = time.perf_counter() - began
        print(f"{'asleep' if asleep else 'awake'} after {seconds:.1f} s, {(total - free) / 2**30:.1f} GiB in use")
    after = run_workload(link, work)
    cached = after.stats.cached_tokens
    print(f"same answers: {[t.tokens for t in after.traces] == before}, {cached} prompt tokens from the cache")


if __name__ == "__main__":
    for name in sys.argv[1:] or ("tiny", "big"):
        {"tiny": tiny, "sampled": sampled, "big": big, "sleep": sleep}[name]()
