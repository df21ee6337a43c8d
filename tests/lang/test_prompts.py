"""Prompts: the same in process and over HTTP, equal to the engine's own answers, exact in their tokens."""

import asyncio
import threading
from dataclasses import replace
from typing import Annotated

import pytest
from msgspec import Meta, Struct

from quire import LLM, AsyncLLM, SamplingParams
from quire.lang import (
    Conversations,
    Int,
    Model,
    StopsAt,
    assistant,
    chunk,
    gen,
    join,
    probabilities,
    select,
    system,
    user,
)
from quire.lang.state import State, Transcript, settle
from quire.types.cache_control import CacheOrder
from quire.types.errors import InputError, QuireError

FRANCE = "The capital of France is"


@pytest.fixture(scope="module")
def plain(default_model):
    """The same weights without the language."""
    with LLM("smollm2-135m", kv_memory="256M") as llm:
        yield llm


def test_a_hole_is_what_the_engine_says(either, plain):
    greedy = SamplingParams(temperature=0, max_tokens=12)
    prompt = either + FRANCE + gen("rest", temperature=0, max_tokens=12)
    output = plain.generate(FRANCE, greedy)[0].outputs[0]
    assert prompt["rest"] == output.text and prompt.text == FRANCE + output.text
    chat = either + user("Name a fruit.") + gen("fruit", temperature=0, max_tokens=12)
    assert chat["fruit"] == plain.chat([{"role": "user", "content": "Name a fruit."}], greedy)[0].outputs[0].text


def test_a_prompt_goes_on_from_its_exact_tokens(either, plain):
    first = either + FRANCE + gen("a", max_tokens=9, seed=4)
    second = first + "\n\nIn short:" + gen("b", max_tokens=5, temperature=0)
    assert second.tokens[: len(first.tokens)] == first.tokens
    tokens = [*first.tokens, *plain.text.tokenizer.encode_on("\n\nIn short:")]
    again = plain.generate([tokens], SamplingParams(temperature=0, max_tokens=5))[0].outputs[0]
    assert second["b"] == again.text


def test_a_stop_string_may_cut_a_token(either):
    """What follows is encoded together with what the token had left."""
    prompt = either + "1, 2, 3, 4, 5, 6" + gen("a", stop="8", max_tokens=12, temperature=0)
    prompt = prompt + "eight" + gen(max_tokens=1)
    assert prompt["a"].endswith("7, ")
    assert prompt.text.startswith("1, 2, 3, 4, 5, 6, 7, eight")


def test_turns(either):
    prompt = either + system("You are brief.") + user("What is 2 + 2?")
    prompt += assistant("It is ", gen("sum", where=Int(0, 9), temperature=0), "!")
    prompt = prompt + user("And what is ", gen("topic", max_tokens=3), "?") + gen("last", max_tokens=3)
    assert [m["role"] for m in prompt.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert prompt.messages[2]["content"] == f"It is {prompt['sum']}!" and isinstance(prompt["sum"], int)
    assert prompt.messages[3]["content"] == f"And what is {prompt['topic']}?"
    with pytest.raises(InputError, match="cannot begin inside"):
        (either + "text" + user("turn") + gen("x"))["x"]


def test_select_is_by_the_models_own_likelihood(either, plain):
    prompt = either + FRANCE + select("city", [" London", " Paris", " Rome"]) + "."
    assert prompt["city"] == " Paris" and prompt.text == FRANCE + " Paris."
    tokens = plain.text.tokenizer.encode(FRANCE)
    for option, score in prompt.scores("city").items():
        more = plain.text.tokenizer.encode_on(option)
        scored = plain.generate([[*tokens, *more]], SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
        assert score == pytest.approx(sum(s.logprob for s in scored[-len(more) :]) / len(more), abs=0.02)
    assert sum(probabilities(prompt.scores("city")).values()) == pytest.approx(1)
    assert (either + FRANCE + select("city", [" Rome", " Paris"], by="grammar"))["city"] == " Paris"


def test_a_select_in_process_is_one_call(plain):
    with Model("smollm2-135m", kv_memory="64M") as model:
        prompt = model + FRANCE + select("city", [" London", " Paris"])
        assert prompt["city"] == " Paris" and prompt.last_usage.calls == 1
        assert prompt.last_usage.prompt_tokens == len(plain.text.tokenizer.encode(FRANCE))


def test_branches_are_one_request_and_repeatable(either):
    def draw():
        return (either + user("Name an animal.")).fork(4) + gen("animal", max_tokens=6, seed=7)

    branches = draw()
    assert len(set(branches["animal"])) > 1 and branches["animal"] == draw()["animal"]
    assert sum(branch.last_usage.calls for branch in branches) == 1
    assert sum(branch.last_usage.output_tokens for branch in branches) > 6
    apart = [b + gen("more", max_tokens=4, seed=7) for b in (either + FRANCE).fork(3)]
    assert len({b["more"] for b in apart}) > 1
    heads = branches[:2] + " It is" + gen("size", max_tokens=3)
    assert len(heads) == 2 and all(head.text.startswith(f"{head['animal']} It is") for head in heads)


def test_join_waits_for_nobody_here(either):
    parts = [either + FRANCE + gen("x", max_tokens=3, temperature=0), either + "2 + 2 =" + gen("x", max_tokens=2)]
    whole = either + user("Notes:\n", join(parts, "x", each="<{}>")) + gen("sum", max_tokens=2)
    assert whole.messages[0]["content"] == "Notes:\n" + "".join(f"<{part['x']}>" for part in parts)


def test_forks_share_pages(model):
    base = model + user("A story about a river. " * 30)
    first = base + gen("a", max_tokens=2)
    assert first["a"] is not None
    second = base + gen("b", max_tokens=2)
    assert second.last_usage.cached_tokens > 0.8 * second.last_usage.prompt_tokens
    third = first + user("Go on.") + gen("c", max_tokens=2)
    assert third.last_usage.cached_tokens > 0.8 * len(first.tokens)


def test_constraints_and_schemas(either):
    class Point(Struct):
        x: Annotated[int, Meta(ge=0, le=9)]
        kind: Annotated[str, Meta(max_length=8)]

    where = either + user("Ask me something.") + gen("q", where=StopsAt("?"), max_tokens=100, temperature=0)
    assert where["q"].endswith("?") and where["q"].count("?") == 1
    point = either + user("A point.") + gen("p", schema=Point)
    assert isinstance(point["p"], Point) and 0 <= point["p"].x <= 9
    cut = either + user("A point.") + gen("p", schema=Point, max_tokens=3)
    with pytest.raises(InputError, match="cut off after 3 tokens"):
        cut["p"]


def test_errors_reach_the_reader(either):
    with pytest.raises(InputError, match="no hole 'y'; it has: x"):
        (either + FRANCE + gen("x", max_tokens=1))["y"]
    failed = either + FRANCE + gen("x", where="(?<=a)b") + gen("y", max_tokens=1)
    with pytest.raises(QuireError):
        failed["y"]


def test_programs_run_beside_each_other(model):
    """Each waits for all: they cannot have run one after the other."""
    together = threading.Barrier(3, timeout=60)

    def program(model, word):
        together.wait()
        return (model + user(word) + gen("x", max_tokens=2)).usage.calls

    assert model.map(program, ["a", "b", "c"]) == [1, 1, 1]


def test_over_an_llm_that_goes_on_afterwards(plain):
    before = plain.generate(FRANCE, SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].text
    with Model(plain) as model:
        assert (model + FRANCE + gen("x", temperature=0, max_tokens=3))["x"] == before
        model + FRANCE + gen("long", max_tokens=2000, ignore_eos=True)  # never read: closing ends it
    assert plain.generate(FRANCE, SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].text == before
    assert plain.stats().running == 0


async def test_over_an_async_llm_on_its_own_loop(default_model):
    async with await AsyncLLM.open("smollm2-135m", kv_memory="128M") as llm, Model(llm) as model:
        one, other = model + FRANCE + gen("x", max_tokens=3), model + FRANCE + gen("x", max_tokens=3)
        with pytest.raises(InputError, match="await prompt"):
            one["x"]
        await asyncio.gather(one, other)
        assert one["x"] and other["x"]


def test_conversations_go_on_from_their_tokens(model):
    known = Conversations(model, keep=2)
    messages = [{"role": "user", "content": "Name a river."}]
    hole = gen(max_tokens=6, seed=3)
    (first,) = known.answer(messages, hole)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Another."}]
    (second,) = known.answer(messages, hole)
    assert second.tokens[: len(first.tokens)] == first.tokens
    assert [m["content"] for m in second.messages[:3]] == [m["content"] for m in messages]
    assert len(known.answer(messages, hole, n=3)) == 3


class Speller:
    """A template that drops a thought once it is over, and a tokenizer of characters."""

    async def render(self, messages, generation):
        texts = [m["content"].split("</think>")[-1] for m in messages]
        return "|".join([*texts, ""]) + (">" if generation else "")

    async def encode(self, text, *, first, special):
        return [ord(c) for c in ("^" if special else "") + text]


async def test_a_template_that_rewrites_the_past_is_followed():
    said = Transcript().begin("user").say("hi").end().say("")
    state = await settle(State(said), Speller())
    assert bytes(state.tokens) == b"hi|>"
    state = state.said("<think>so</think>yo", [*b"<think>so</think>yo"], "<think>so</think>yo", state.usage)
    later = State(state.transcript.begin("user").say("ok").end().say(""), state.tokens, state.text)
    assert bytes((await settle(later, Speller())).tokens) == b"hi|yo|ok|>"


async def test_chunks_are_tokenised_by_themselves():
    said = Transcript().begin("user").say("a").say("bcd", chunk=True).say("e", chunk=True).say("?").end().say("")
    state = await settle(State(said), Speller())
    assert bytes(state.tokens) == b"abcde?|>" and state.chunks == ((1, 4), (4, 5)) and said.text == ""
    state = state.said("yes", [*b"yes"], "yes", state.usage)
    later = replace(state, transcript=state.transcript.begin("user").say("fg", chunk=True).end().say(""))
    state = await settle(later, Speller())
    assert bytes(state.tokens) == b"abcde?|yes|fg|>" and state.chunks == ((1, 4), (4, 5), (11, 13))
    with pytest.raises(InputError, match="x03"):
        await settle(State(said.say("\x03")), Speller())


def test_chunks_are_reused_behind_others(either):
    things = enumerate(("bell", "oar", "map"))
    texts = [f"Notice {n}: the {thing} is kept in room {n + 20}. " * 8 for n, thing in things]

    def ask(*order):
        documents = [chunk(texts[i]) for i in order]
        return either + user("Read this.\n", *documents, "Where is the map?") + gen("said", max_tokens=2, temperature=0)

    assert ask(0, 1).usage.blended_tokens == ask(1, 2).usage.blended_tokens == 0
    asked = ask(0, 2)
    assert asked.usage.blended_tokens > 50 and asked["said"]
    assert asked.messages[0]["content"] == f"Read this.\n{texts[0]}{texts[2]}Where is the map?"


def test_a_chunk_is_a_text():
    with pytest.raises(InputError, match="a chunk is a text, got 5"):
        chunk(5)


def test_a_session_keeps_a_prompts_pages(model):
    begun = (model + user("Remember this sentence word for word. " * 6)).session("agent", 60)
    asked = begun + gen("said", max_tokens=2)
    assert asked["said"]
    report, _ = model.wait(model.start(model.backend._frontend.client.cache(CacheOrder(action="look"))))
    assert [(s.session, s.pages > 2) for s in report.sessions] == [("agent", True)]
    with pytest.raises(InputError, match="session_ttl"):
        str((model + "x").session("agent", 0) + gen(max_tokens=1))
