"""Chunks at other places on the default model: what users call, and what it must not change."""

import asyncio

import pytest

from quire import LLM, AsyncLLM, BlendParams, SamplingParams
from quire.bench.chunk_reuse_bench import cases, measure, rows
from quire.types.errors import InputError

GREEDY = SamplingParams(temperature=0, max_tokens=12, seed=0)
CUT = "<|cut|>"


@pytest.fixture(scope="module")
def compiled(default_model):
    """The path that runs by default on a CPU; pages in 16 bits."""
    with LLM(kv_pages=400, max_model_len=2048, threads=1) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_leaks(compiled):
    yield
    stats = compiled.stats()
    assert stats.running == stats.waiting == stats.pages_used == 0
    compiled._link.core.scheduler.check()


def prompt(order):
    (case, *_), _ = cases(1, documents=4, chosen=4)
    return [{"role": "user", "content": CUT.join(("Read this.", *(case.documents[i] for i in order), case.question))}]


@pytest.mark.slow
def test_all_recomputed_is_what_the_whole_prompt_gives(compiled):
    compiled.reset()
    every = BlendParams(separator=CUT, recompute=1.0)
    compiled.chat(prompt([0, 1, 2, 3]), GREEDY, blend=every)
    (blended,) = compiled.chat(prompt([2, 0, 3, 1]), GREEDY, blend=every)
    compiled.reset()
    (whole,) = compiled.generate([blended.prompt_token_ids], GREEDY)
    assert blended.blended_tokens > 300 and whole.blended_tokens == 0
    assert blended.outputs[0].token_ids == whole.outputs[0].token_ids


def test_an_answer_does_not_depend_on_what_was_cached(compiled):
    compiled.reset()
    how = BlendParams(separator=CUT)
    fresh, again = (compiled.chat(prompt([1, 0, 2, 3]), GREEDY, blend=how)[0] for _ in range(2))
    assert fresh.cached_tokens == 0 and fresh.blended_tokens > 150, "what was computed apart and copied is not exact"
    assert again.blended_tokens > 300
    assert fresh.outputs[0].token_ids == again.outputs[0].token_ids
    stats = compiled.stats()
    assert 0.1 < stats.recomputed_tokens / stats.blended_tokens < 0.2
    assert stats.finished == {"length": 2}, "chunks are no requests"


def test_a_mapping_will_do_and_what_it_says_is_checked(compiled):
    by_name, by_class = (
        compiled.chat(prompt([0, 1]), GREEDY, blend=how)[0].prompt_token_ids
        for how in ({"separator": CUT, "recompute": 0.5}, BlendParams(separator=CUT, recompute=0.5))
    )
    assert by_name == by_class
    compiled.generate([[1, 2, 3]], SamplingParams(max_tokens=1), blend={"chunks": [(0, 2)]})
    for how, message in (
        ({"seperator": CUT}, "unknown field `seperator`"),
        ({"separator": CUT, "recompute": "0.5"}, "Expected `float | null`, got `str`"),
        ({"chunks": [(0, 9)]}, r"chunks\[0\] of blend, \[0, 9\), ends behind the prompt, which has 3 tokens"),
        ("|", "Expected `object`, got `str`"),
    ):
        with pytest.raises(InputError, match=message) as refused:
            compiled.generate([[1, 2, 3]], SamplingParams(max_tokens=1), blend=how)
        assert refused.value.param == "blend"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"separator": CUT, "recompute": "0.5"}, "recompute is a part of the tokens, from 0 to 1, got '0.5'"),
        ({"separator": CUT, "recompute": True}, "recompute is a part of the tokens, from 0 to 1, got True"),
        ({"separator": CUT, "max_error": "1"}, "max_error is relative, 0 or more, got '1'"),
        ({"separator": 5}, "the separator is a text, got 5"),
        ({"chunks": 5}, "chunks is a list"),
    ],
)
def test_parameters_of_the_wrong_kind_say_so(given, message):
    with pytest.raises(InputError, match=message):
        BlendParams(**given)


@pytest.mark.slow
def test_branches_and_many_requests_at_once(compiled):
    compiled.reset()
    how = BlendParams(separator=CUT)
    many = [prompt(order) for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2])]
    together = compiled.chat(many, SamplingParams(temperature=0, max_tokens=6, n=2, seed=0), blend=how)
    alone = [compiled.chat(one, SamplingParams(temperature=0, max_tokens=6, seed=0), blend=how)[0] for one in many]
    for pair, single in zip(together, alone, strict=True):
        assert [out.token_ids for out in pair.outputs] == [single.outputs[0].token_ids] * 2


def test_what_makes_no_sense_is_refused(compiled):
    with pytest.raises(InputError, match="nowhere in the prompt"):
        compiled.generate("no documents", GREEDY, blend=BlendParams(separator=CUT))
    with pytest.raises(InputError, match="token ids have none"):
        compiled.generate([1, 2, 3], GREEDY, blend=BlendParams(separator=CUT))
    for wrong in ({"separator": ""}, {"separator": "x" * 300}, {"separator": "x", "recompute": 1.5}):
        with pytest.raises(InputError):
            BlendParams(**wrong)
    with pytest.raises(InputError, match="more than 1024 chunks"):
        compiled.generate("|" * 2000, GREEDY, blend=BlendParams(separator="|"))


@pytest.mark.slow
def test_the_benchmark_on_a_small_scale(compiled):
    found = measure(compiled, 2, documents=3, chosen=3, answer=9, shares=(0.0, 1.0))
    none, whole = found["runs"].values()
    assert whole["same"] == whole["same_first"] == 1 and whole["divergence"] < 1e-6
    assert whole["right"] == found["right"] and whole["recomputed"] == 1
    assert none["divergence"] > 1e-4 and none["reused"] > 0.1 and none["recomputed"] == 0
    assert [answer["place"] for answer in none["answers"]] == [0, 1]
    assert len(rows(found)) == 4


def test_the_asynchronous_engine(default_model):
    async def ask():
        async with await AsyncLLM.open(kv_pages=400, max_model_len=2048, threads=1) as llm:
            how = BlendParams(separator=CUT)
            return await llm.chat(prompt([3, 1, 0, 2]), GREEDY, blend=how)

    assert asyncio.run(ask()).blended_tokens > 150
