"""Context-parallel ranks each of which is several tensor-parallel ones: threads compute one process's logits, processes
give its answers, and the bytes are those of the formula."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import test_context
import test_sharding
import torch
from model_harness import run_model
from tiny_engine import GREEDY, Engine
from tiny_models import CONFIGS, prompts, tiny

from quire.assets import resolve
from quire.model import load_model, read_spec
from quire.model.parallel import check_parallel, step_bytes
from quire.runtime.model_fit import model_fit
from quire.types.config import DeviceOptions, EngineOptions
from quire.types.errors import ConfigError, EngineDeadError
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

TWO_BY_TWO = {"context_parallel": 2, "tensor_parallel": 2}
QUICK = ["llama-biased-tied", "one-kv-head", "olmo2", "gpt-oss", "deepseek-v3", "gemma4-moe"]
FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=12, n=2, ignore_eos=True)


def on_grid(work, whole_experts=False):
    """What `work` makes of each of two by two ranks, in order."""
    barriers, given = [threading.Barrier(2, timeout=60) for _ in range(2)], [[None] * 2 for _ in range(2)]
    links: list[dict] = [{}, {}]

    def one(rank):
        place, part = divmod(rank, 2)
        ranks = test_context.ThreadRanks(place, 2, links[part])
        ranks.tensor = test_sharding.ThreadRanks(part, 2, barriers[place], given[place], whole_experts)
        try:
            return work(ranks)
        except BaseException:
            for barrier in barriers:
                barrier.abort()
            raise

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, range(4)))


def same_logits(source, **how):
    """Those of all tokens on every rank, those of rows' last tokens on the ranks that have them."""
    whole = load_model(source, device="cpu", dtype=torch.float32)
    for chunk, last in ((13, False), (13, True)):
        asked = prompts(41, 29, 2)
        wanted = run_model(whole, asked, chunk=chunk, last=last)
        assert torch.cat(wanted).std() > 0.01, "the model says something"

        def run(ranks, asked=asked, chunk=chunk, last=last):
            model = load_model(source, device="cpu", dtype=torch.float32, ranks=ranks)
            return run_model(model, asked, chunk=chunk, last=last, context=2)

        found = on_grid(run, **how)
        for rank in found[:2] if last else found:
            for got, want in zip(rank, wanted, strict=True):
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_by_two_ranks_compute_one_process_s_logits(name, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    source = resolve(str(tmp_path)).open()
    try:
        check_parallel(read_spec(source), DeviceOptions(**TWO_BY_TWO))
    except ConfigError as error:
        assert name not in QUICK
        pytest.skip(str(error))
    same_logits(source)


def test_experts_stay_whole_on_each_tensor_parallel_rank(tmp_path):
    tiny("qwen3-moe").save_pretrained(tmp_path)
    same_logits(resolve(str(tmp_path)).open(), whole_experts=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama3")
    tiny("llama3").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engines(files):
    """One process, and two by two, with drafts and prompts in several chunks."""
    options = {"speculation": "ngram", "draft_tokens": 3, "draft_adapt": False, "max_batch_tokens": 17}
    one, four = Engine(files, kv_pages=300, **options), Engine(files, kv_pages=150, **TWO_BY_TWO, **options)
    yield one, four
    four.core.close()


@pytest.mark.parametrize(
    "params", [GREEDY, pytest.param(SAMPLED, marks=pytest.mark.slow)], ids=["greedy", "seeded branches"]
)
def test_answers_are_one_process_s(engines, params):
    """Chunks beside decode, hits in and between pages, forks, drafts, preemption."""
    asked = prompts(33, 21, 40, 5)
    asked.append(asked[0][:19] + asked[1])
    one, four = engines
    for _ in range(2):  # the second time on prefix hits
        assert four.answers(asked, params=params) == one.answers(asked, params=params)
    stats = four.core.scheduler.stats
    assert stats.cached_tokens >= 64 and (stats.drafted_tokens > 0 or params is SAMPLED)
    assert four.answers(asked, params=params, preempt=5) == one.answers(asked, params=params)


def test_prompt_log_probabilities_are_one_process_s(engines):
    """Hidden states of all tokens come together, logits from both parts of the vocabulary."""
    (prompt,) = prompts(60)
    one, four = (engine.prompt_logprobs(prompt) for engine in engines)
    assert len(one) >= 59 and four == pytest.approx(one, abs=1e-4)


def test_a_rank_has_half_the_heads_of_half_the_tokens(engines):
    one, four = (engine.core.executor for engine in engines)
    assert four.layout.groups[0].tokens_per_page == 2 * one.layout.groups[0].tokens_per_page
    assert 2 * four.layout.page_bytes == one.layout.page_bytes == 2 * four._worker.pages.shape[1]


@pytest.fixture(scope="module")
def short_lived(files):
    """Another two by two, until one of them is killed."""
    engine = Engine(files, kv_pages=100, prefix_cache=False, max_batch_tokens=16, **TWO_BY_TWO)
    yield engine
    engine.core.executor.close()


def test_bytes_are_counted_by_the_formula(files, short_lived):
    """A prompt in two chunks, the second behind what the first has left in pages, then decode."""
    (prompt,) = prompts(27)
    short_lived.answers([prompt], params=SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    spec, options = read_spec(resolve(str(files)).open()), DeviceOptions(**TWO_BY_TWO)
    steps = [((0, 16), 0), ((16, 11), 1), ((27, 1), 1), ((28, 1), 1), ((29, 1), 1)]
    wanted = sum(step_bytes(spec, options, 4, [row], samples=samples) for row, samples in steps)
    assert short_lived.core.scheduler.stats.exchanged_bytes == wanted
    said = "context parallel: 4 ranks by gloo, each with 1/2 of every layer and every 2. token of a KV page"
    assert any(line.startswith(said) for line in short_lived.core.executor.describe().reasons)


def test_a_rank_that_dies_ends_the_engine_and_is_named(short_lived):
    """Whichever of the groups the others wait in."""
    engine = short_lived
    processes = engine.core.executor._processes
    pid = processes.pids[2]
    engine.core.submit(Request(id="a", prompt=prompts(15)[0], params=GREEDY))
    engine.core.step()
    os.kill(pid, signal.SIGKILL)
    processes._processes[2].wait()
    with pytest.raises(EngineDeadError, match=rf"rank 3 \(process {pid}\) was ended by signal 9"):
        while True:
            engine.core.step()


def test_what_fits_is_known_from_the_headers(files):
    """What `quire doctor` says: on CPUs ranks share one memory, with as many copies as contexts have parts."""
    source, sizes = resolve(str(files)).open(), {"model": str(files), "dtype": "float32", "kv_memory": "1M"}
    one, four = (model_fit(source, EngineOptions.of(**sizes, **how)) for how in ({}, TWO_BY_TWO))
    assert four.weights == 2 * one.weights and four.layout.page_bytes * 2 == one.layout.page_bytes
    assert four.tokens == pytest.approx(4 * one.tokens, rel=0.02)
