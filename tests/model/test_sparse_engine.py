"""Sparse attention under the engine: the same answers alone, batched, chunked, on a prefix hit, from a tier; with all
pages those of full attention. What is computed again after preemption reads everything, so that those may differ."""

from __future__ import annotations

import pytest
from tiny_engine import Engine
from tiny_models import prompts, tiny

from quire import LLM
from quire.types.errors import ConfigError, InputError
from quire.types.sampling_params import SamplingParams

PAGES = 13  # of 4 tokens, of contexts of some 25 pages


def greedy(pages: int | None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, sparse_pages=pages)


# Layers with windows beside others, and with states; those with nothing else and with soft caps are slow.
FAMILIES = [
    "qwen2-layer-types", "qwen3-next", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama3", "gemma2"))
]  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def files(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    tiny(request.param).save_pretrained(path)
    return path


def engine(path, **options) -> Engine:
    return Engine(path, **{"max_model_len": 128, "kv_pages": 400} | options)


def test_answers_do_not_depend_on_what_runs_beside_them(files):
    asked = prompts(90, 84, 101, 30)
    alone = [engine(files).answers([prompt], params=greedy(PAGES))[0] for prompt in asked]
    full = [engine(files).answers([prompt], params=greedy(None))[0] for prompt in asked]
    assert alone[:3] != full[:3] and alone[3] == full[3]
    assert engine(files).answers(asked, params=greedy(PAGES)) == alone
    assert engine(files, prefill_chunk=40).answers(asked, params=greedy(PAGES)) == alone
    again = engine(files)
    assert [len(answer) for answer in again.answers(asked, preempt=5, params=greedy(PAGES))] == [16] * 4
    assert again.answers(asked, params=greedy(PAGES)) == alone  # on a prefix hit
    assert again.answers(asked, params=greedy(None)) == full
    assert again.answers(asked, params=greedy(40)) == full  # of no more pages than that
    assert engine(files, sparse_pages=PAGES).answers(asked, params=greedy(None)) == alone
    assert engine(files, sparse_pages=PAGES).answers(asked, params=greedy(0)) == full


def test_pages_that_others_wrote_before_are_read_as_they_are_now(files):
    """Few pages, so that each is another's soon; and a tier that they come back from."""
    asked = [prompts(90, seed=seed)[0] for seed in range(4)]
    alone = [engine(files).answers([prompt], params=greedy(PAGES))[0] for prompt in asked]
    small = engine(files, kv_pages=70, kv_host="16M") if "next" not in str(files) else engine(files, kv_pages=200)
    for _ in range(3):
        for prompt, expected in zip(asked, alone, strict=True):
            assert small.answers([prompt], params=greedy(PAGES)) == [expected]


@pytest.mark.parametrize("kind", ["quest", "blocks"])
def test_bytes_are_counted(files, kind):
    made = engine(files, sparse_attention=kind)
    made.answers([prompts(100)[0]], params=greedy(PAGES))
    stats = made.core.stats()
    assert 0 < stats.sparse_bytes < stats.sparse_bytes_of_all


def test_branches_and_drafts(files):
    asked = prompts(90, 95)
    params = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=16, ignore_eos=True, sparse_pages=PAGES)
    alone = [one for prompt in asked for one in engine(files).answers([prompt], params=params)]
    assert engine(files).answers(asked, params=params) == alone
    drafting = engine(files, speculation="ngram", draft_tokens=4)
    greedily = [engine(files).answers([prompt], params=greedy(PAGES))[0] for prompt in asked]
    assert drafting.answers(asked, params=greedy(PAGES)) == greedily


def test_what_cannot_be_is_refused():
    with pytest.raises(InputError, match="kv_budget"):
        SamplingParams(sparse_pages=8, kv_budget=64)
    with pytest.raises(ConfigError, match="quest, blocks"):
        LLM("smollm2-135m", sparse_attention="some")
    with pytest.raises(ConfigError, match="at least 6"):
        LLM("smollm2-135m", sparse_pages=5)
    with pytest.raises(InputError, match="at least 6"):
        SamplingParams(sparse_pages=5).check_sparse(16, True)
    with pytest.raises(InputError, match="not available"):
        SamplingParams(sparse_pages=50).check_sparse(16, False)
    SamplingParams(sparse_pages=0).check_sparse(16, False)
