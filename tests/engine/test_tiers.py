"""Tiers under the real engine: what comes back from them gives the same tokens, whatever happens to them meanwhile."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from quire import LLM, SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "runtime"))
from redis_server import needs_server, redis_server

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL = {"kv_pages": 40, "max_model_len": 512, "threads": 1}  # two prompts of these at a time, not all


@pytest.fixture(scope="module")
def prompts(default_model):
    rng = random.Random(3)
    return [[rng.randrange(1000, 40_000) for _ in range(200)] for _ in range(5)]


@pytest.fixture(scope="module")
def expected(prompts):
    """Each prompt's answer where nothing ever leaves the device."""
    with LLM(kv_pages=400, max_model_len=512, threads=1) as llm:
        return answers(llm, prompts)


def answers(llm, prompts):
    return [llm.generate(prompt, PARAMS)[0].outputs[0].token_ids for prompt in prompts]


def tiers(llm):
    return {tier.name: tier for tier in llm.stats().tiers}


def test_pages_come_back_from_host_memory(prompts, expected):
    with LLM(**SMALL, kv_host="100M") as llm:
        assert answers(llm, prompts) == expected == answers(llm, prompts)
        assert tiers(llm)["host"].hit_tokens >= 4 * 192
        assert llm.stats().tier_saved > 0


@pytest.mark.slow
def test_all_at_once_while_pages_load(prompts, expected):
    with LLM(**SMALL, kv_host="100M", depth=2) as llm:
        answers(llm, prompts)
        found = llm.generate(prompts, PARAMS)
        assert [out.outputs[0].token_ids for out in found] == expected
        assert tiers(llm)["host"].hit_tokens > 0


def test_a_killed_engine_leaves_its_pages_to_the_next(prompts, expected, tmp_path, record_property):
    options = {"kv_pages": 400, "max_model_len": 512, "threads": 1, "kv_disk": f"{tmp_path}/kv:200M", "process": True}
    llm = LLM(**options)
    began = time.perf_counter()
    assert answers(llm, prompts) == expected
    cold = time.perf_counter() - began
    pages = 5 * (200 // 16)
    while tiers(llm)["disk"].pages < pages:  # written behind; asking lets the engine take in what has ended
        llm.generate([1, 2, 3], PARAMS)
    os.kill(llm._link.pid, signal.SIGKILL)
    llm._link._process.wait()
    llm.close()
    with LLM(**options) as again:
        began = time.perf_counter()
        assert answers(again, prompts) == expected
        warm = time.perf_counter() - began
        disk = tiers(again)["disk"]
    assert disk.hit_tokens == 5 * 192 and disk.missed == 0
    record_property("warm_over_cold", warm / cold)
    assert warm < cold


def test_damaged_pages_are_computed_again(prompts, expected, tmp_path):
    options = {"kv_pages": 400, "max_model_len": 512, "threads": 1, "kv_disk": f"{tmp_path}/kv:200M"}
    with LLM(**options) as llm:
        answers(llm, prompts)
    rng = random.Random(9)
    files = sorted((tmp_path / "kv").glob("*/*/*"))
    assert len(files) >= 60
    for file in rng.sample(files, 20):
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data if rng.random() < 0.7 else data[: rng.randrange(len(data))])
    a, b = rng.sample(files, 2)
    first = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(first)
    with LLM(**options) as llm:
        assert answers(llm, prompts) == expected
        assert tiers(llm)["disk"].missed >= 5


def test_pages_of_another_precision_are_not_found(dense_model, tmp_path):
    prompt, found = [list(range(1, 81))], []
    for dtype in ("bfloat16", "bfloat16", "float32"):
        options = {"kv_pages": 100, "max_model_len": 96, "threads": 1, "kv_disk": f"{tmp_path}/kv:100M"}
        with LLM(dense_model, dtype=dtype, **options) as llm:
            answers(llm, prompt)
            found.append(tiers(llm)["disk"].hit_tokens)
    assert found == [0, 64, 0]


@needs_server
def test_engines_share_a_prefix_through_a_server(prompts, expected, tmp_path):
    with redis_server(tmp_path) as (url, server):
        options = {"kv_pages": 400, "max_model_len": 512, "threads": 1, "kv_remote": url}
        with LLM(**options) as first, LLM(**options) as second:
            assert answers(first, prompts[:3]) == expected[:3]
            while tiers(first)["remote"].pages < 3 * 12:
                first.generate([1, 2, 3], PARAMS)
            assert answers(second, prompts[:2]) == expected[:2]
            assert tiers(second)["remote"].hit_tokens == 2 * 192
            server.kill()
            server.wait()
            assert answers(second, prompts) == expected  # by computing
            assert tiers(second)["remote"].hit_tokens == 2 * 192
