"""The `openai` client, which nobody here wrote, against a live server: first over the fake, then the real model."""

from __future__ import annotations

import functools
import math
from typing import Any

import openai
import pytest

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
PROMPT = "The days of the week are Monday, Tuesday,"


@pytest.fixture(params=["fake_server", "live_server"], scope="module")
def client(request: pytest.FixtureRequest) -> openai.OpenAI:
    url = request.getfixturevalue(request.param)
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_models(client: openai.OpenAI, model: str) -> None:
    assert client.models.retrieve(model).id == model
    assert client.models.retrieve(model).object == "model"


def test_chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_completion_tokens=12, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.model == model
    assert answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    again = client.chat.completions.create(
        model=model, messages=[*QUESTION, choice.message, QUESTION[0]], max_tokens=4, temperature=0
    )
    assert again.system_fingerprint == answer.system_fingerprint


def test_text_parts_are_one_text(client: openai.OpenAI, model: str) -> None:
    parts: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]}
    ]
    whole: list[Any] = [{"role": "user", "content": "Hello\nyou"}]
    counts = {
        client.chat.completions.create(model=model, messages=messages, max_tokens=1).usage.prompt_tokens  # type: ignore[union-attr]
        for messages in (parts, whole)
    }
    assert len(counts) == 1


def test_completion(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert client.completions.create(model=model, prompt=PROMPT, temperature=0).usage.completion_tokens == 16  # type: ignore[union-attr]


def test_usage_counts_tokens_and_cached_ones(client: openai.OpenAI, model: str) -> None:
    prompt = "Once upon a time, there was a small village by the sea. " * 4
    for _ in range(2):
        usage = client.completions.create(model=model, prompt=prompt, max_tokens=5, temperature=0, n=2).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.completion_tokens == 10
    assert usage.total_tokens == usage.prompt_tokens + 10
    assert 16 <= usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens  # type: ignore[operator]


def test_best_of_answers_with_the_likeliest(client: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "prompt": [PROMPT, "One, two,"], "max_tokens": 6, "seed": 3}
    every = client.completions.create(**options, n=5, logprobs=1)
    best = client.completions.create(**options, n=2, best_of=5, logprobs=1)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    for prompt in range(2):
        expected = sorted(every.choices[5 * prompt : 5 * prompt + 5], key=mean, reverse=True)[:2]
        assert [c.text for c in best.choices[2 * prompt : 2 * prompt + 2]] == [c.text for c in expected]
    assert [c.index for c in best.choices] == [0, 1, 2, 3]
    assert best.usage is not None and best.usage.completion_tokens == every.usage.completion_tokens  # type: ignore[union-attr]


def test_chat_streaming_equals_the_whole(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=12, temperature=0)
    text, roles, finishes, usage = "", [], [], None
    with client.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            assert chunk.object == "chat.completion.chunk"
            if chunk.usage is not None:
                assert chunk.choices == []
                usage = chunk.usage
                continue
            [choice] = chunk.choices
            text += choice.delta.content or ""
            roles.append(choice.delta.role)
            finishes.append(choice.finish_reason)
    assert text == whole.choices[0].message.content
    assert roles == ["assistant", *[None] * (len(roles) - 1)]
    assert finishes == [*[None] * (len(finishes) - 1), whole.choices[0].finish_reason]
    assert len(finishes) > 4
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_completion_streaming_equals_the_whole(client: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "prompt": [PROMPT, "One, two,"], "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**options, n=2)
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**options, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}


def test_stop_string_is_not_in_the_text(client: openai.OpenAI, model: str) -> None:
    free = client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0)
    text = free.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0, stop=[stop, "\0never"])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == text[: text.index(stop)]
    pieces = client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == cut.choices[0].text


def test_n_choices(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, n=3, max_tokens=6, seed=7, temperature=1.5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage is not None and answer.usage.completion_tokens <= 18


def test_seed_repeats_and_differs(client: openai.OpenAI, model: str) -> None:
    def sample(seed: int) -> str:
        return client.completions.create(model=model, prompt="I like", max_tokens=8, seed=seed).choices[0].text

    first = sample(1)
    assert sample(1) == first
    assert {sample(2), sample(3)} != {first}


def test_chat_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    [choice] = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    entries = choice.logprobs.content
    assert answer.usage is not None and len(entries) == answer.usage.completion_tokens
    raw = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert (choice.message.content or "") in raw.decode("utf-8", "ignore")
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        scores = [top.logprob for top in entry.top_logprobs]
        assert scores == sorted(scores, reverse=True)
        assert entry.logprob == scores[0] <= 0.0  # greedy takes the likeliest
        assert entry.token == entry.top_logprobs[0].token
        assert sum(map(math.exp, scores)) <= 1.0 + 1e-3
    streamed: list[str] = []
    for chunk in client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3, stream=True
    ):
        if chunk.choices[0].logprobs is not None:
            streamed += [entry.token for entry in chunk.choices[0].logprobs.content or []]
    assert streamed == [entry.token for entry in entries]


def test_completion_logprobs_and_echo(client: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "logprobs": 2}
    plain = client.completions.create(**options).choices[0]
    assert plain.logprobs is not None and plain.logprobs.tokens is not None
    assert len(plain.logprobs.tokens) == 5
    assert plain.logprobs.text_offset is not None and plain.logprobs.text_offset[0] == 0
    echoed = client.completions.create(**options, echo=True)
    [choice] = echoed.choices
    assert choice.text == PROMPT + plain.text
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert logprobs.text_offset is not None and logprobs.top_logprobs is not None and echoed.usage is not None
    assert len(logprobs.tokens) == echoed.usage.total_tokens
    assert logprobs.tokens[-5:] == plain.logprobs.tokens
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert all(score is not None and score <= 0 for score in logprobs.token_logprobs[1:])
    assert logprobs.text_offset[-5] == len(PROMPT)
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or choice.text.startswith(token, offset)


def test_token_id_prompts(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=[[40, 41, 42], [43, 44]], max_tokens=3, n=2, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None and answer.usage.prompt_tokens == 5
    one = client.completions.create(model=model, prompt=[40, 41, 42], max_tokens=3, temperature=0)
    assert one.choices[0].text == answer.choices[0].text == answer.choices[1].text


def test_extensions(client: openai.OpenAI, model: str) -> None:
    body = {"ignore_eos": True, "top_k": 5, "min_p": 0.05, "min_tokens": 4, "repetition_penalty": 1.1}
    more = {
        "stop_token_ids": [5],
        "bad_words": ["zebra"],
        "cache_salt": "a",
        "skip_special_tokens": False,
    }
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=9, seed=3, extra_body={**body, **more})
    assert answer.usage is not None and 4 <= answer.usage.completion_tokens <= 9


def test_an_engine_without_priorities_has_one_tier(live_server: str) -> None:
    client = openai.OpenAI(base_url=f"{live_server}/v1", api_key="none", max_retries=0)
    ask = functools.partial(client.chat.completions.create, model="smollm2-135m", messages=QUESTION, max_tokens=2)
    assert ask(service_tier="flex").service_tier == "default" and ask(service_tier="auto").service_tier == "auto"
    with pytest.raises(openai.BadRequestError, match="scheduler priority") as caught:
        ask(extra_body={"priority": -1})
    assert caught.value.param == "priority"


def test_prompt_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=[40, 41, 42], max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    scores = (answer.choices[0].model_extra or {})["prompt_logprobs"]
    assert scores[0] is None
    assert [str(token) in position for token, position in zip((41, 42), scores[1:], strict=True)] == [True, True]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("empty messages", {"messages": []}, "messages"),
    ("temperature too high", {"temperature": 1e6}, "temperature"),
    ("negative temperature", {"temperature": -1}, "temperature"),
    ("top_p zero", {"top_p": 0}, "top_p"),
    ("n zero", {"n": 0}, "n"),
    ("n too large", {"n": 10**6}, "n"),
    ("no tokens wanted", {"max_tokens": 0}, "max_tokens"),
    ("penalty out of range", {"presence_penalty": 3}, "presence_penalty"),
    ("bias out of range", {"logit_bias": {"5": 1000}}, "logit_bias"),
    ("bias on no token", {"logit_bias": {"99999999": 1}}, "logit_bias"),
    ("wrong type", {"max_tokens": "five"}, "max_tokens"),  # type: ignore[dict-item]
    ("too many top logprobs", {"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
    ("unknown field", {"extra_body": {"temprature": 1}}, "temprature"),
    ("too long", {"messages": [{"role": "user", "content": "word " * 60_000}]}, "messages"),
]


@pytest.mark.parametrize(("change", "param"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_requests_name_the_field(client: openai.OpenAI, model: str, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": model, "messages": QUESTION, "max_tokens": 2, **change})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    body = caught.value.body
    assert isinstance(body, dict) and body["message"] and set(body) == {"message", "type", "param", "code"}
    assert client.completions.create(model=model, prompt="x", max_tokens=1).choices  # still serving


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [10**9], [-1]])
def test_bad_prompts(client: openai.OpenAI, model: str, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt=prompt, max_tokens=2)
    assert caught.value.param == "prompt"


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="no-such-model", prompt="x")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")
