"""The Python API over the default model: what users call, and what happens when they call it wrongly."""

import gc
import math
import weakref
from itertools import zip_longest

import pytest
import torch

from quire import LLM, AsyncLLM, SamplingParams
from quire.engine import gc_control
from quire.types.beam import BeamParams
from quire.types.errors import ConfigError, ContextLengthError, EngineDeadError, InputError, ModelNotFoundError
from quire.types.grammar import GrammarSpec
from quire.types.messages import Submit
from quire.types.request import FinishReason

PROMPT = "The capital of France is"


def greedy(**params):
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, **params})


@pytest.fixture(autouse=True)
def nothing_leaks(fast, llm):
    yield
    for engine in (fast, llm):
        stats = engine.stats()
        assert stats.running == stats.waiting == stats.pages_used == 0
        engine._link.core.scheduler.check()


def test_results_have_the_known_shape(fast):
    (result,) = fast.generate(PROMPT, greedy())
    (output,) = result.outputs
    assert result.prompt == PROMPT and result.prompt_token_ids == fast.text.tokenizer.encode(PROMPT)
    assert output.text.startswith(" Paris") and len(output.token_ids) == 8
    assert output.finish_reason == "length" and output.logprobs is None
    assert result.times.submitted <= result.times.first_token <= result.times.finished


def test_token_ids_and_text_are_the_same_prompt(fast):
    ids = fast.text.tokenizer.encode(PROMPT)
    by_text, by_ids, many = (fast.generate(prompt, greedy()) for prompt in (PROMPT, ids, [ids]))
    assert by_text[0].outputs[0].text == by_ids[0].outputs[0].text == many[0].outputs[0].text


def test_each_prompt_may_have_its_own_parameters(fast):
    short, long = fast.generate([PROMPT, PROMPT], [greedy(max_tokens=2), greedy(max_tokens=5)])
    assert [len(r.outputs[0].token_ids) for r in (short, long)] == [2, 5]
    with pytest.raises(InputError, match="2 prompts but 1"):
        fast.generate([PROMPT, PROMPT], [greedy()])


def test_whoever_may_take_longest_begins_first(fast, monkeypatch):
    sent, send = [], fast._link.send
    monkeypatch.setattr(fast._link, "send", lambda *messages: (sent.extend(messages), send(*messages)))
    lengths = [3, 8, 2, 8]
    results = fast.generate([[5 + n] for n in range(4)], [greedy(max_tokens=n, ignore_eos=True) for n in lengths])
    assert [m.request.prompt[0] - 5 for m in sent if isinstance(m, Submit)] == [1, 3, 0, 2]
    assert [len(r.outputs[0].token_ids) for r in results] == lengths


@pytest.fixture
def tiny_torch(dense_model):
    with LLM(dense_model, dtype="float32", kv_memory="16M", max_model_len=64) as engine:
        yield engine


@pytest.mark.parametrize("path", ["compiled", "torch"])
def test_an_engine_makes_no_cycles(request, tiny_torch, path):
    """Which is why nobody need look for them while it works."""
    ways = [
        greedy(stop=["Paris"]),
        SamplingParams(n=3, seed=1, max_tokens=6, logprobs=2, prompt_logprobs=1),
        SamplingParams(seed=2, max_tokens=12, grammar=GrammarSpec("regex", "[a-z]{3,9}"), presence_penalty=0.5),
    ]

    llm = tiny_torch if path == "torch" else request.getfixturevalue("fast")

    def work():
        llm.generate([PROMPT] * 3, ways)
        llm.beam_search(PROMPT, BeamParams(beams=3, max_tokens=4))
        llm.embed(PROMPT)
        next(iter(llm.stream(PROMPT, greedy())))  # and left: it is aborted

    work()  # what is made once, and kept
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(3):
            work()
        gc.collect()
        found = [type(one) for one in gc.garbage if type(one).__module__.startswith("quire")]
    finally:
        gc.set_debug(0)
        gc.enable()
        gc.garbage.clear()
    assert not found


def test_garbage_is_not_looked_for_while_a_batch_is_answered(fast, monkeypatch):
    before, seen, receive = gc.get_threshold(), [], fast._link.receive
    monkeypatch.setattr(fast._link, "receive", lambda wait: (seen.append(gc.get_threshold()), receive(wait))[1])
    fast.generate([PROMPT] * 2, greedy())
    assert {threshold[0] for threshold in seen} == {gc_control.MAX_NEW_OBJECTS} and gc.get_threshold() == before

    def failing(wait):
        raise EngineDeadError("as it may")

    with monkeypatch.context() as patched:
        patched.setattr(fast._link, "receive", failing)
        with pytest.raises(EngineDeadError):
            fast.generate([PROMPT] * 2, greedy())
    assert gc.get_threshold() == before
    fast.stats()  # what was aborted is gone


def test_chat_stops_at_the_end_of_the_turn(fast):
    (result,) = fast.chat([{"role": "user", "content": "Say hello."}], greedy(max_tokens=60))
    assert result.outputs[0].finish_reason is FinishReason.STOP
    assert "<|im_end|>" not in result.outputs[0].text


def test_each_conversation_may_have_its_own_parameters(fast):
    asks = [[{"role": "user", "content": "Count to ten."}]] * 2
    found = fast.chat(asks, [greedy(max_tokens=2), greedy(max_tokens=4)])
    assert [len(one.outputs[0].token_ids) for one in found] == [2, 4]
    with pytest.raises(InputError, match="2 prompts but 1"):
        fast.chat(asks, [greedy()])
    for wrong in ("hello", ["hello"]):
        with pytest.raises(InputError, match="list of messages"):
            fast.chat(wrong)


def test_stream_is_the_answer_in_pieces(fast):
    whole = fast.generate(PROMPT, greedy())[0].outputs[0]
    deltas = list(fast.stream(PROMPT, greedy()))
    assert "".join(d.text for d in deltas) == whole.text
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids
    assert deltas[-1].finish_reason is FinishReason.LENGTH and not any(d.finish_reason for d in deltas[:-1])


def test_streams_may_be_read_in_turn_and_others_called_beside_them(fast):
    other, params = "Two plus two is", greedy(max_tokens=4)
    alone = [[t for d in fast.stream(prompt, params) for t in d.token_ids] for prompt in (PROMPT, other)]
    found = [], []
    for deltas in zip_longest(fast.stream(PROMPT, params), fast.stream(other, params)):
        fast.stats()
        for tokens, delta in zip(found, deltas, strict=True):
            tokens += delta.token_ids if delta else []
    assert list(found) == alone
    answers = [fast.generate(other, params)[0].outputs[0].token_ids for _ in fast.stream(PROMPT, params)]
    assert answers == [alone[1]] * len(answers)
    fast.embed(PROMPT)
    assert not fast._inboxes


def test_leaving_a_stream_ends_the_request(fast):
    for delta in fast.stream(PROMPT, greedy(max_tokens=500)):
        if delta.token_ids:
            break


def test_seeds_repeat_and_branches_differ(fast):
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, n=3)
    first, second = fast.generate(PROMPT, params), fast.generate([PROMPT, "Noise beside it"], params)[:1]
    texts = [o.token_ids for o in first[0].outputs]
    assert texts == [o.token_ids for o in second[0].outputs]
    assert len({tuple(t) for t in texts}) == 3
    (other,) = fast.generate(PROMPT, SamplingParams(temperature=1.0, seed=6, max_tokens=6))
    assert other.outputs[0].token_ids != texts[0]


def test_branches_share_the_prompt(fast):
    fast.reset()
    prompt = list(range(1000, 1100))
    fast.generate(prompt, SamplingParams(temperature=1.0, seed=1, max_tokens=2, n=4))
    stats = fast.stats()
    assert stats.rows < 100 + 4 * 2 and stats.pages_peak <= 7 + 3


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.8}, {"bad_words": [" the cat's name is"]}])
def test_what_looks_back_sees_a_cached_prompt_too(fast, params):
    """Of a prompt that is cached, the slot is given only what is computed, unless a draw looks at the rest."""
    prompt = "My name is Ada, your name is Bo, his name is Cy, her name is Di, the dog's name is Ed, and the cat's name"
    wanted = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **params)
    first, plain = (fast.generate(prompt, one)[0] for one in (wanted, SamplingParams(temperature=0, max_tokens=8)))
    fast.generate(list(range(1000, 1200)), SamplingParams(max_tokens=1))  # whose tokens are in its slot now
    again = fast.generate(prompt, wanted)[0]
    assert again.cached_tokens > 16
    assert again.outputs[0].token_ids == first.outputs[0].token_ids != plain.outputs[0].token_ids


def test_unseeded_requests_differ(fast):
    a, b = fast.generate([PROMPT] * 2, SamplingParams(temperature=1.5, max_tokens=12))
    assert a.outputs[0].token_ids != b.outputs[0].token_ids


def test_stop_strings_end_the_text_before_them(fast):
    whole = fast.generate(PROMPT, greedy(max_tokens=12))[0].outputs[0]
    stop = whole.text[5:9]
    cut = fast.generate(PROMPT, greedy(max_tokens=12, stop=[stop]))[0].outputs[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == (FinishReason.STOP, stop)
    kept = fast.generate(PROMPT, greedy(max_tokens=12, stop=[stop], include_stop=True))[0].outputs[0]
    assert kept.text == cut.text + stop


def test_stop_tokens_and_min_tokens(fast):
    whole = fast.generate(PROMPT, greedy())[0].outputs[0].token_ids
    stopped = fast.generate(PROMPT, greedy(stop_token_ids=[whole[2]]))[0].outputs[0]
    assert stopped.token_ids == whole[: whole.index(whole[2]) + 1] and stopped.stop_reason == whole[2]
    longer = fast.generate(PROMPT, greedy(stop_token_ids=[whole[2]], min_tokens=6))[0].outputs[0]
    assert len(longer.token_ids) >= 6 and whole[2] not in longer.token_ids[:5]


def test_bad_words_and_bias_change_the_choice(fast):
    plain = fast.generate(PROMPT, greedy())[0].outputs[0]
    banned = fast.generate(PROMPT, greedy(bad_words=["Paris"]))[0].outputs[0]
    assert "Paris" not in banned.text
    biased = fast.generate(PROMPT, greedy(logit_bias={plain.token_ids[0]: -100}))[0].outputs[0]
    assert biased.token_ids[0] != plain.token_ids[0]


def test_logprobs_equal_the_oracles(llm, oracle):
    (result,) = llm.generate(PROMPT, greedy(logprobs=3, prompt_logprobs=2))
    ids = result.prompt_token_ids + result.outputs[0].token_ids
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
    start = len(result.prompt_token_ids) - 1
    for i, entry in enumerate(result.outputs[0].logprobs):
        row = expected[start + i]
        assert entry.token == result.outputs[0].token_ids[i] and entry.rank == 1
        assert math.isclose(entry.logprob, row[entry.token], abs_tol=1e-3)
        assert torch.allclose(torch.tensor(entry.top_logprobs), row.topk(3).values, atol=1e-3)
    assert len(result.prompt_logprobs) == start
    for i, entry in enumerate(result.prompt_logprobs):
        assert entry.token == ids[i + 1] and len(entry.top_ids) == 2
        assert math.isclose(entry.logprob, expected[i][entry.token], abs_tol=1e-3)
        assert entry.rank == int((expected[i] > expected[i][entry.token]).sum()) + 1


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("", {}, InputError),
        ([], {}, InputError),
        ([10**6], {}, InputError),
        ([-1], {}, InputError),
        ([1] * 9000, {}, ContextLengthError),
        (PROMPT, {"logit_bias": {10**6: 1.0}}, InputError),
        (PROMPT, {"stop_token_ids": [10**6]}, InputError),
    ],
)
def test_wrong_prompts_are_refused(fast, prompt, params, error):
    with pytest.raises(error):
        fast.generate([prompt], greedy(**params))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_p": 0}, {"top_p": 1.1},
        {"top_k": -1}, {"min_p": 2}, {"n": 0}, {"max_tokens": 0}, {"min_tokens": 5, "max_tokens": 4},
        {"repetition_penalty": 0}, {"presence_penalty": 3}, {"logprobs": 1000}, {"stop": [""]}, {"seed": 1 << 70},
        {"logit_bias": {1: math.nan}}, {"bad_words": [""]},
    ],
)  # fmt: skip
def test_wrong_parameters_are_refused(params):
    with pytest.raises(InputError) as caught:
        SamplingParams(**params)
    assert caught.value.param in params


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="unknown option 'page_sise'"):
        LLM("smollm2-135m", page_sise=3)
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        LLM("no-such-model")
    with pytest.raises(ConfigError, match="float8"):
        LLM("smollm2-135m", dtype="float8")
    with pytest.raises(ConfigError, match="needs more KV memory"):
        LLM("smollm2-135m", max_model_len=4000, kv_pages=10)


@pytest.mark.parametrize("path", ["compiled", "torch"])
def test_a_closed_engine_gives_its_memory_back_at_once(default_model, dense_model, path):
    """Weights and pages in a cycle would wait for the garbage collector, which does not see how large they are."""
    engine = LLM(dense_model if path == "torch" else "smollm2-135m", kv_memory="64M")
    engine.generate(PROMPT, greedy(max_tokens=2))
    executor = engine._link.core.executor
    large = [weakref.ref(executor.model), weakref.ref(executor._worker)]
    gc.disable()
    try:
        engine.close()
        del engine, executor
        assert [it() for it in large] == [None, None]
    finally:
        gc.enable()


async def test_async_form(default_model):
    async with await AsyncLLM.open("smollm2-135m", kv_memory="128M") as engine:
        result = await engine.generate(PROMPT, greedy())
        assert result.outputs[0].text.startswith(" Paris")
        pieces = []
        request = engine.prepare(PROMPT, greedy(max_tokens=50))
        stream = engine.stream(request)
        async for deltas in stream:
            pieces += deltas
            break
        await stream.aclose()
        answer = await engine.chat([{"role": "user", "content": "Say hello."}], greedy(max_tokens=4))
        assert answer.outputs[0].token_ids
        stats = await engine.client.stats()
        assert stats.finished.get("abort") == 1 and stats.pages_used == 0


def test_a_session_keeps_the_pages_of_its_conversation(fast):
    fast.reset()
    fast.generate(PROMPT * 8, greedy(), session_id="agent", session_ttl=60)
    fast.chat([{"role": "user", "content": PROMPT * 8}], greedy(), session_id="other")
    held = fast._link.core.scheduler.features.sessions.view(0.0)
    assert [view.session for view in held] == ["agent", "other"] and all(view.pages >= 2 for view in held)
    for wrong in (0, 1e9):
        with pytest.raises(InputError, match="session_ttl"):
            fast.generate(PROMPT, greedy(), session_id="agent", session_ttl=wrong)
    with pytest.raises(InputError, match="one conversation"):
        fast.generate([PROMPT, PROMPT], greedy(), session_id="agent")
    fast.reset()
