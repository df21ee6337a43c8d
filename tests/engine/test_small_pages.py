"""Pages of 8 bits under the real engine: how many there are, what tiers, sharing and forks make of them."""

import random

import pytest

from quire import LLM, SamplingParams
from quire.kernels.cpu import shared_object as library
from quire.model import read_spec
from quire.model.blocks.fused import FusedStages
from quire.runtime.capacity import kv_layout
from quire.runtime.hardware import Hardware, resolve
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
EIGHT = {"kv_dtype": "int8", "max_model_len": 512, "threads": 1}


@pytest.fixture(scope="module")
def prompts(default_model):
    rng = random.Random(3)
    return [[rng.randrange(1000, 40_000) for _ in range(200)] for _ in range(5)]


@pytest.fixture(scope="module")
def expected(prompts):
    """Each prompt's answer where nothing ever leaves the device."""
    with LLM(**EIGHT, kv_pages=400) as llm:
        return answers(llm, prompts)


def answers(llm, prompts):
    return [llm.generate(prompt, PARAMS)[0].outputs[0].token_ids for prompt in prompts]


def tier(llm, name):
    return next(tier for tier in llm.stats().tiers if tier.name == name)


def test_there_are_almost_twice_as_many(default_model, capsys):
    if reason := library.available():
        pytest.skip(reason)
    pages = {}
    for kind in ("auto", "int8", "int8-kivi", "fp8", "int4"):
        with LLM(kv_dtype=kind, kv_memory="64M", max_model_len=512, threads=1) as llm:
            pages[kind] = llm.stats().pages_total
            told = f"{pages[kind] * 16:,} tokens in {pages[kind]:,} pages"
            assert any(told in reason for reason in llm.info.reasons)
    with capsys.disabled():
        print("\npages in 64 MiB:", pages)
    for kind in ("int8", "int8-kivi", "fp8"):
        assert pages[kind] / pages["auto"] >= 1.9
    assert pages["int4"] / pages["auto"] >= 3


@pytest.mark.slow
def test_pages_come_back_from_tiers(prompts, expected, tmp_path):
    small = {**EIGHT, "kv_pages": 40}  # two prompts of these at a time, not all
    with LLM(**small, kv_host="100M") as llm:
        assert answers(llm, prompts) == expected == answers(llm, prompts)
        assert tier(llm, "host").hit_tokens >= 4 * 192
    disk = f"{tmp_path}/kv:200M"
    with LLM(**small, kv_disk=disk) as llm:
        assert answers(llm, prompts) == expected
    with LLM(**small, kv_disk=disk) as llm:
        assert answers(llm, prompts) == expected
        assert tier(llm, "disk").hit_tokens == 5 * 192 and tier(llm, "disk").missed == 0
    for other in ("auto", "int8-kivi", "fp8"):  # to whom these pages mean nothing
        with LLM(**small | {"kv_dtype": other}, kv_disk=disk) as llm:
            answers(llm, prompts[:1])
            assert tier(llm, "disk").hit_tokens == 0


def test_a_shared_prefix_and_forks(prompts):
    """Branches share the prompt's pages and copy the last of them when they write: what each says is what it would have
    said alone, to the last bit."""
    sampled = SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=24, logprobs=0, ignore_eos=True)
    prompt = prompts[0][:70]
    with LLM(**EIGHT, kv_pages=400) as llm:
        branches = llm.generate(prompt, sampled)[0].outputs
        again = llm.generate(prompt, sampled)[0]
        assert again.cached_tokens == 69
        assert [b.token_ids for b in again.outputs] == [b.token_ids for b in branches]
    assert len({tuple(branch.token_ids) for branch in branches}) == 4
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(**EIGHT, kv_pages=400, prefix_cache=False) as llm:
        for branch in branches:
            whole = llm.generate(prompt + branch.token_ids, scored)[0].prompt_logprobs[-24:]
            assert [e.token for e in whole] == branch.token_ids
            assert [e.logprob for e in whole] == [e.logprob for e in branch.logprobs]


def scores(prompt, model="smollm2-135m", length=512, **options):
    """Log-probabilities of a prompt's tokens in plain torch."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(model, dtype="float32", kv_pages=100, max_model_len=length, threads=1, **options) as llm:
        return [entry.logprob for entry in llm.generate(prompt, params)[0].prompt_logprobs[1:]]


@pytest.mark.parametrize(
    ("kind", "near"),
    [
        pytest.param("int8", 0.1, marks=pytest.mark.slow),
        pytest.param("fp8", 0.25, marks=pytest.mark.slow),
        pytest.param("int4", 0.8, marks=pytest.mark.slow),
    ],
)
def test_plain_torch_runs_on_them_too(prompts, kind, near):
    """Which of two tokens is ahead by a hair may change; what the model makes of a text may not by much."""
    pairs = zip(scores(prompts[0], kv_dtype=kind), scores(prompts[0]), strict=True)
    assert 0 < sum(abs(found - exact) for found, exact in pairs) / 199 < near


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_plain_torch_runs_a_tiny_model_on_them(dense_model, kind):
    """Eight bits are nearer than four."""
    rng = random.Random(5)
    prompt = [rng.randrange(1, 90) for _ in range(80)]
    found, exact = scores(prompt, dense_model, 96, kv_dtype=kind), scores(prompt, dense_model, 96)
    apart = sum(abs(a - b) for a, b in zip(found, exact, strict=True)) / len(exact)
    assert 0 < apart < {"int8": 0.1, "fp8": 0.25, "int4": 0.8}[kind]


@pytest.mark.parametrize("kind", ["int3", "fp8-kivi", "float8_e4m3fn"])
def test_what_there_is_not_is_refused(default_model, kind):
    with pytest.raises(ConfigError, match="kv_dtype must be one of auto, int8"):
        LLM(kv_dtype=kind)


def test_what_a_gpu_runs(default_model):
    gpu, spec = Hardware("cuda:0", "a GPU", 1 << 34, 8), read_spec(default_model.open())
    kinds = ("bfloat16", *FusedStages.kv_kinds)

    def layout(kv_dtype, **more):
        options = EngineOptions.of(kv_dtype=kv_dtype, **more)
        return kv_layout(options, resolve(options, gpu), spec, "bfloat16", kinds).dtype

    assert layout("auto") == "bfloat16"
    assert layout("int8") == layout("int8-kivi") == "int8"
    assert layout("fp8") == layout("auto", dtype="fp8") == "float8_e4m3fn"
    with pytest.raises(ConfigError, match=r"pages cannot be int4: .* takes pages of bfloat16, .*int8"):
        layout("int4")
