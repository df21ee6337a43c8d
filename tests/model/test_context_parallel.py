"""Context-parallel engines of real processes: the answers of one process, over contexts that one cannot hold."""

from __future__ import annotations

import pytest
from tiny_engine import GREEDY, Engine
from tiny_models import prompts, tiny

from quire.assets import resolve
from quire.model import read_spec
from quire.model.context_parallel import context_bytes
from quire.runtime.model_fit import model_fit
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError, InputError
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
    """One process, and two ranks, with drafts and prompts in several chunks."""
    options = {"speculation": "ngram", "draft_tokens": 3, "draft_adapt": False, "max_batch_tokens": 17}
    one, two = Engine(files, kv_pages=300, **options), Engine(files, kv_pages=150, context_parallel=2, **options)
    yield one, two
    two.core.close()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "seeded branches"])
def test_answers_are_one_process_s(engines, params):
    """Chunks beside decode, hits in and between pages, forks, drafts, preemption."""
    asked = prompts(33, 21, 40, 5)
    asked.append(asked[0][:19] + asked[1])
    one, two = engines
    for _ in range(2):  # the second time on prefix hits
        assert two.answers(asked, params=params) == one.answers(asked, params=params)
    assert two.core.scheduler.stats.cached_tokens >= 64 and two.core.scheduler.stats.drafted_tokens > 0
    assert two.answers(asked, params=params, preempt=5) == one.answers(asked, params=params)


def test_a_context_that_one_rank_s_pages_do_not_hold(files):
    """As many pages of as many bytes take twice the tokens."""
    (prompt,) = prompts(100)
    sizes = {"kv_pages": 16, "max_model_len": 124, "max_batch_tokens": 40}
    with pytest.raises(ConfigError, match=r"max_model_len 124 needs more KV memory than there is \(64 tokens fit"):
        Engine(files, **sizes)
    one = Engine(files, **sizes | {"kv_pages": 31})
    two = Engine(files, **sizes, context_parallel=2)
    try:
        assert two.answers([prompt]) == one.answers([prompt])
        layouts = [engine.core.executor.layout for engine in (one, two)]
        assert layouts[0].page_bytes == layouts[1].page_bytes == two.core.executor._worker.pages.shape[1]
        assert [layout.groups[0].tokens_per_page for layout in layouts] == [4, 8]
    finally:
        two.core.close()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt-oss", {}),
        ("llama3", {"speculation": "draft:{}"}),
        pytest.param("deepseek-v3", {}, marks=pytest.mark.slow),
        pytest.param("llama3", {"kv_dtype": "int8"}, marks=pytest.mark.slow),
    ],
    ids=["windows and sinks", "draft model", "latents", "rounded pages"],
)
def test_answers_are_one_process_s_with(name, options, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    options = {"max_batch_tokens": 19} | {key: value.format(tmp_path) for key, value in options.items()}
    one, two = Engine(tmp_path, kv_pages=300, **options), Engine(tmp_path, kv_pages=150, context_parallel=2, **options)
    try:
        asked = prompts(33, 21, 40, 5)
        for preempt in (0, 5):
            assert two.answers(asked, preempt=preempt) == one.answers(asked)
    finally:
        two.core.close()


def test_prompt_log_probabilities_are_one_process_s(engines):
    """Hidden states of all tokens come together."""
    (prompt,) = prompts(60)
    one, two = (engine.prompt_logprobs(prompt) for engine in engines)
    assert len(one) >= 59 and two == pytest.approx(one, abs=1e-4)


def test_bytes_are_counted_by_the_formula(files):
    """A prompt in two chunks, the second behind what the first has left in pages, then decode."""
    engine = Engine(files, context_parallel=2, kv_pages=100, prefix_cache=False, max_batch_tokens=16)
    try:
        (prompt,) = prompts(27)
        engine.answers([prompt], params=SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        spec = read_spec(resolve(str(files)).open())
        steps = [((0, 16), 0), ((16, 11), 1), ((27, 1), 1), ((28, 1), 1), ((29, 1), 1)]
        wanted = sum(context_bytes(spec, 0, 2, 4, [row], samples=samples) for row, samples in steps)
        assert engine.core.scheduler.stats.exchanged_bytes == wanted
        assert any(line.startswith("context parallel: 2 ranks by gloo") for line in reasons(engine))
    finally:
        engine.core.close()


def test_twice_the_tokens_are_known_from_the_headers(files):
    """What `quire doctor` says."""
    source, sizes = resolve(str(files)).open(), {"model": str(files), "dtype": "float32", "kv_memory": "1M"}
    one, two = (model_fit(source, EngineOptions.of(**sizes, context_parallel=n)) for n in (1, 2))
    assert two.pages == one.pages and two.tokens == 2 * one.tokens and two.weights == 2 * one.weights
    assert any(line.startswith("context parallel: 2 ranks by gloo, each with all weights") for line in two.kernels)


def reasons(engine):
    return engine.core.executor.describe().reasons


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pipeline_parallel": 2}, "context_parallel has no effect beside pipeline_parallel"),
        ({"tensor_parallel": 4}, "tensor_parallel 4 cannot divide llama: 6 attention heads"),
        ({"tensor_parallel": 2, "pipeline_parallel": 2}, "pipeline_parallel has no effect beside tensor_parallel"),
        ({"tensor_parallel": 2, "expert_parallel": True}, "expert_parallel has no effect: llama has no experts"),
        ({"speculation": "mtp"}, "reads the target's embeddings"),
        ({"depth": 2}, "depth is 1 for ranks on CPUs"),
        ({"kv_dtype": "kivi4"}, "kv_dtype kivi4 has no effect beside context_parallel"),
        ({"kv_dtype": "int8-kivi"}, "kv_dtype int8-kivi has no effect beside context_parallel"),
        ({"kv_host": "1M"}, "kv_host has no effect beside context_parallel"),
        ({"max_loras": 1}, "max_loras has no effect beside context_parallel"),
        ({"sparse_pages": 40}, "sparse_pages has no effect beside context_parallel"),
        ({"invariant": True}, "invariant has no effect beside context_parallel"),
    ],
)
def test_what_cannot_run_on_ranks_is_refused(files, options, why):
    with pytest.raises(ConfigError, match=why):
        Engine(files, context_parallel=2, **options)
    with pytest.raises(ConfigError, match=why):  # known from the headers too: what `quire doctor` says
        model_fit(resolve(str(files)).open(), EngineOptions.of(model=str(files), context_parallel=2, **options))


def test_a_family_that_cannot_is_refused_by_name_at_the_start(tmp_path):
    tiny("lfm2").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"context_parallel 2 cannot divide lfm2: .*recurrent layers \(ShortConv"):
        Engine(tmp_path, context_parallel=2)


def test_requests_that_move_keys_are_refused(engines):
    _, two = engines
    params = SamplingParams(temperature=0, max_tokens=4, kv_budget=32)
    with pytest.raises(InputError, match="kv_budget cannot be used here: context-parallel ranks divide its pages"):
        two.core.submit(Request(id="evicts", prompt=prompts(20)[0], params=params))


def test_named_as_others_name_it():
    with pytest.raises(ConfigError, match="it is called context_parallel here"):
        EngineOptions.of(decode_context_parallel_size=2)
