"""Tensor-parallel engines of real processes: the answers of one process, and an end that is said, never a hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_engine import GREEDY, Engine
from tiny_models import prompts, tiny

from quire.assets import resolve
from quire.model import read_spec
from quire.model.sharding import exchanged_bytes
from quire.runtime.hardware import probe
from quire.runtime.model_fit import model_fit
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError, EngineDeadError
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=12, n=2, ignore_eos=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama3")
    tiny("llama3").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engines(files):
    """One process, and two ranks, with drafts."""
    options = {"kv_pages": 300, "speculation": "ngram", "draft_tokens": 3, "draft_adapt": False}
    one, two = Engine(files, **options), Engine(files, tensor_parallel=2, **options)
    yield one, two
    two.core.close()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "seeded branches"])
def test_answers_are_one_process_s(engines, params):
    asked = prompts(33, 21, 40, 5)
    one, two = engines
    for _ in range(2):  # the second time on prefix hits
        assert two.answers(asked, params=params) == one.answers(asked, params=params)
    assert two.core.scheduler.stats.cached_tokens >= 64 and two.core.scheduler.stats.drafted_tokens > 0
    assert two.answers(asked, params=params, preempt=5) == one.answers(asked, params=params)


def test_prompt_log_probabilities_are_one_process_s(engines):
    """Logits that are computed as they are read are read by every rank."""
    (prompt,) = prompts(60)
    one, two = (engine.prompt_logprobs(prompt) for engine in engines)
    assert len(one) >= 59 and two == pytest.approx(one, abs=1e-4)


def test_bytes_are_counted_by_the_formula(files):
    engine = Engine(files, tensor_parallel=2, kv_pages=100, prefix_cache=False)
    try:
        (prompt,) = prompts(20)
        engine.answers([prompt], params=SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
        spec = read_spec(resolve(str(files)).open())
        first, later = (exchanged_bytes(spec, 2, 4, tokens=n, rows=1, samples=1) for n in (20, 1))
        assert engine.core.scheduler.stats.exchanged_bytes == first + 4 * later
        assert any(
            line.startswith("tensor parallel: 2 ranks by gloo") for line in engine.core.executor.describe().reasons
        )
    finally:
        engine.core.close()


@pytest.mark.parametrize("busy", [True, False], ids=["under a request", "idle"])
def test_a_rank_that_dies_ends_the_engine_and_is_named(files, busy):
    engine = Engine(files, tensor_parallel=2, kv_pages=100)
    processes = engine.core.executor._processes
    (pid,) = processes.pids
    if busy:
        engine.core.submit(Request(id="a", prompt=prompts(20)[0], params=GREEDY))
        engine.core.step()
    os.kill(pid, signal.SIGKILL)
    processes._processes[0].wait()
    with pytest.raises(EngineDeadError, match=rf"rank 1 \(process {pid}\) was ended by signal 9"):
        while True:
            engine.core.step() if busy else engine.core.settle()
    engine.core.executor.close()


def test_ranks_end_with_their_parent(files, tmp_path):
    """However it ends."""
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]; from tiny_engine import Engine; "
        "engine = Engine(sys.argv[1], tensor_parallel=2, kv_pages=50); "
        "print(*engine.core.executor._processes.pids, flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", script, str(files), str(Path(__file__).parent)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        descriptor = os.pidfd_open(pid)
        parent.kill()
    import select

    assert select.select([descriptor], [], [], 60)[0], "the rank outlives its parent"
    os.close(descriptor)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tensor_parallel": 4}, "cannot divide llama: 6 attention heads"),
        ({"tensor_parallel": 2, "speculation": "mtp"}, "reads the target's embeddings"),
        ({"tensor_parallel": 2, "expert_parallel": True}, "expert_parallel has no effect: llama has no experts"),
        ({"expert_parallel": True}, "expert_parallel has no effect without tensor_parallel"),
        ({"tensor_parallel": 2, "depth": 2}, "depth is 1 for ranks on CPUs"),
        ({"tensor_parallel": 2, "kv_dtype": "int8-kivi"}, "kv_dtype int8-kivi has no effect beside tensor_parallel"),
        ({"tensor_parallel": 2, "pipeline_parallel": 2}, "pipeline_parallel has no effect beside tensor_parallel"),
        ({"tensor_parallel": 2, "kv_host": "1M"}, "kv_host has no effect beside tensor_parallel"),
        ({"tensor_parallel": 2, "max_loras": 1}, "max_loras has no effect beside tensor_parallel"),
    ],
)
def test_what_cannot_run_on_ranks_is_refused(files, options, why):
    with pytest.raises(ConfigError, match=why):
        Engine(files, **options)


def test_expert_parallel_answers_are_one_process_s(tmp_path):
    tiny("qwen3-moe").save_pretrained(tmp_path)
    asked = prompts(33, 21)
    one = Engine(tmp_path, kv_pages=200)
    two = Engine(tmp_path, kv_pages=200, tensor_parallel=2, expert_parallel=True)
    try:
        assert two.answers(asked) == one.answers(asked)
    finally:
        two.core.close()


def test_named_as_others_name_it():
    with pytest.raises(ConfigError, match="it is called tensor_parallel here"):
        EngineOptions.of(tensor_parallel_size=2)


@pytest.mark.parametrize("how", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"context_parallel": 2}], ids=str)
def test_memory_of_all_ranks_is_told(files, how):
    """As many pages as one process has; context-parallel ranks have as many each."""
    one, two = Engine(files, kv_pages=100), Engine(files, kv_pages=100, **how)
    try:
        stats = two.core.stats()
        assert stats.kv_bytes == one.core.stats().kv_bytes * (2 if "context_parallel" in how else 1)
        assert stats.memory > one.core.stats().memory + (64 << 20), "Python and torch of the other process"
    finally:
        two.core.close()
    fit = model_fit(
        resolve(str(files)).open(), EngineOptions.of(model=str(files), dtype="float32", kv_memory="1M", **how)
    )
    assert fit.ranks == 2 and 0.9 * (2 << 20) < fit.kv_bytes <= 2 << 20, "kv_memory is each rank's"


def test_kv_memory_that_ranks_together_do_not_have_is_refused(files):
    """It is each rank's, and those of a CPU share one memory."""
    free = probe("cpu").memory
    with pytest.raises(ConfigError, match=r"kv_memory \w+ for each of 2 ranks is more than the .* free; lower it"):
        Engine(files, tensor_parallel=2, kv_memory=f"{free * 3 // 4 >> 20}M")


@pytest.mark.parametrize("how", ["tensor_parallel", "pipeline_parallel"])
def test_attention_on_all_ranks_says_what_is_evicted(files, how):
    """A page's attention is that of all heads and layers, wherever they are."""
    options = {"kv_pages": 100, "max_model_len": 120, "prefix_cache": False}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, kv_budget=64, kv_eviction="h2o")
    one, two = Engine(files, **options), Engine(files, **options, **{how: 2})
    try:
        asked = prompts(100, 90)
        assert two.answers(asked, params=params) == one.answers(asked, params=params)
        evicted = [engine.core.scheduler.stats.evicted_tokens for engine in (one, two)]
        assert evicted[0] == evicted[1] > 60
    finally:
        two.core.close()
