"""Think first, then answer under a schema or a required tool: a tiny random model whose template opens a thought."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest
import thinking_model

from quire.assets import resolve
from quire.engine.client import AsyncClient
from quire.engine.frontend import Frontend
from quire.serve.http.server import ServerUrl, background_server
from quire.text import TextModel
from quire.types.config import EngineOptions
from quire.types.serving import ServeOptions

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "w": {"enum": ["yes", "no"]}},
    "required": ["n", "w"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "act", "parameters": SCHEMA}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
CLOSE = "</think>"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(thinking_model.make(tmp_path_factory.mktemp("thinking")))


@pytest.fixture(scope="module")
def text(path: str) -> TextModel:
    return TextModel.load(resolve(path))


@pytest.fixture(scope="module")
def url(path: str, text: TextModel) -> Iterator[ServerUrl]:
    """Few pages, so that answers are preempted; and drafts."""
    options = EngineOptions.of(
        model=path, dtype="float32", page_size=16, kv_pages=60, max_seqs=8, max_model_len=600, threads=1,
        speculation="ngram", draft_tokens=3,
    )  # fmt: skip

    async def frontend() -> Frontend:
        return Frontend(await AsyncClient.open(options), text, "tiny")

    with background_server(
        frontend, ServeOptions(port=0, admin_port=0, max_queue_tokens=100_000, max_queue_wait=600)
    ) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def asked(client: openai.OpenAI, text: TextModel, seed: int, **fields: Any) -> Any:
    """Thoughts that repeat themselves (so that drafts are right) and end after some ten tokens, and answers that
    nothing but a grammar ends."""
    close, end = text.tokenizer.token_id(CLOSE), text.tokenizer.token_id("<|im_end|>")
    [again] = text.tokenizer.encode("z")
    extra = {"logit_bias": {str(again): 7.5, str(close): 6.0, str(end): -100.0}, **fields.pop("extra_body", {})}
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": f"{seed}?"}], temperature=1.0, seed=seed,
        extra_body=extra, **{"max_tokens": 400, **fields},
    )  # fmt: skip


def thought_of(answer: Any) -> str:
    """A thought may be ended before it has begun."""
    return getattr(answer.choices[0].message, "reasoning_content", None) or ""


def check(case: int, answer: Any) -> None:
    message = answer.choices[0].message
    if case % 4 == 3:
        [call] = message.tool_calls
        assert call.function.name == "act" and not message.content
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    elif case % 4 == 2:
        assert re.fullmatch(r"[ab]{2}-[0-9]", message.content)
    else:
        jsonschema.validate(json.loads(message.content), SCHEMA)


CONSTRAINTS: list[dict[str, Any]] = [
    {"response_format": FORMAT},
    {"extra_body": {"guided_json": SCHEMA}},
    {"extra_body": {"guided_regex": r"[ab]{2}-[0-9]"}},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
]


@pytest.mark.parametrize("cases", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_thoughts_are_free_and_answers_are_valid(
    url: ServerUrl, client: openai.OpenAI, text: TextModel, cases: int
) -> None:
    """What is thought is what the same seed thinks without any constraint; with drafts and preemption."""

    def pair(case: int) -> tuple[Any, Any]:
        return asked(client, text, case, **CONSTRAINTS[case % 4]), asked(client, text, case, max_tokens=200)

    with ThreadPoolExecutor(12) as pool:
        pairs = list(pool.map(pair, range(cases)))
    lengths = set()
    for case, (bound, free) in enumerate(pairs):
        check(case, bound)
        thought = thought_of(bound)
        if case % 4 != 3:  # tools are told of in the prompt
            assert thought == thought_of(free)
        lengths.add(len(thought))
        assert bound.choices[0].finish_reason in ("stop", "tool_calls")
    assert len(lengths) > cases // 10
    metrics = httpx.get(f"{url.admin}/metrics", headers={"Accept": "text/plain"}).text
    for name in ("quire_num_preemptions_total", "quire_spec_decode_num_accepted_tokens_total"):
        assert [value for value in re.findall(rf"^{name}\S* ([0-9.e+]+)", metrics, re.MULTILINE) if float(value)]


def test_streams_say_the_same(client: openai.OpenAI, text: TextModel) -> None:
    for case in range(8):
        answer = asked(client, text, case, **CONSTRAINTS[case % 4])
        whole = answer.choices[0].message
        thought, said, called = "", "", ""
        for chunk in asked(client, text, case, stream=True, **CONSTRAINTS[case % 4]):
            delta = chunk.choices[0].delta
            thought += getattr(delta, "reasoning_content", None) or ""
            said += delta.content or ""
            called += "".join(call.function.arguments or "" for call in delta.tool_calls or ())
        assert (thought, said or None) == (thought_of(answer), whole.content or None)
        assert called == (whole.tool_calls[0].function.arguments if whole.tool_calls else "")


@pytest.mark.parametrize("off", [{"reasoning_effort": "none"}, {"extra_body": {"enable_thinking": False}}], ids=str)
def test_without_thinking_the_constraint_holds_from_the_start(client: openai.OpenAI, text: TextModel, off: Any) -> None:
    for case in range(4):
        fields = {**CONSTRAINTS[case], **off}
        fields["extra_body"] = CONSTRAINTS[case].get("extra_body", {}) | off.get("extra_body", {})
        answer = asked(client, text, case, **fields)
        check(case, answer)
        assert not thought_of(answer)


def test_a_model_may_open_its_thought_itself_or_answer_at_once(client: openai.OpenAI, text: TextModel) -> None:
    opened = 0
    for case in range(16):
        bias = {str(text.tokenizer.token_id("<think>")): 3.0, str(text.tokenizer.token_id(CLOSE)): 5.0}
        extra = {
            "chat_template_kwargs": {"bare": True},
            "logit_bias": bias,
            **CONSTRAINTS[case % 4].get("extra_body", {}),
        }
        answer = asked(client, text, case, **{**CONSTRAINTS[case % 4], "extra_body": extra})
        check(case, answer)
        opened += bool(thought_of(answer))
    assert 0 < opened < 16


@pytest.mark.parametrize(
    "budget",
    [{"thinking_budget": 9}, {"thinking_token_budget": 9}, {"thinking": {"type": "enabled", "budget_tokens": 9}},
     {"reasoning": {"max_tokens": 9}}],
    ids=lambda budget: min(budget),
)  # fmt: skip
def test_at_its_budget_the_end_of_a_thought_is_forced(client: openai.OpenAI, text: TextModel, budget: Any) -> None:
    never = {str(text.tokenizer.token_id(CLOSE)): -100.0}
    for case in range(4):
        extra = {**CONSTRAINTS[case].get("extra_body", {}), **budget, "logit_bias": never}
        answer = asked(client, text, case, **{**CONSTRAINTS[case], "extra_body": extra})
        check(case, answer)
        assert answer.usage.completion_tokens_details.reasoning_tokens >= 8
    free = asked(client, text, 0, max_tokens=60, extra_body={**budget, "logit_bias": never})
    assert len(free.choices[0].message.reasoning_content.encode()) <= 3 * 9 and free.choices[0].message.content


def test_a_thought_without_an_end_ends_with_the_tokens(client: openai.OpenAI, text: TextModel) -> None:
    never = {str(text.tokenizer.token_id(CLOSE)): -100.0}
    for case in range(4):
        extra = {**CONSTRAINTS[case].get("extra_body", {}), "logit_bias": never}
        answer = asked(client, text, case, max_tokens=20, **{**CONSTRAINTS[case], "extra_body": extra})
        choice = answer.choices[0]
        assert choice.finish_reason == "length" and not choice.message.content and not choice.message.tool_calls
        assert choice.message.reasoning_content and answer.usage.completion_tokens == 20


def test_other_apis_think_first_too(url: str, text: TextModel) -> None:
    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
    tool: Any = {"name": "act", "input_schema": SCHEMA}
    answer = claude.messages.create(
        model="tiny", max_tokens=400, messages=[{"role": "user", "content": "?"}], tools=[tool],
        tool_choice={"type": "tool", "name": "act"}, thinking={"type": "enabled", "budget_tokens": 12},
    )  # fmt: skip
    assert [block.type for block in answer.content] == ["thinking", "tool_use"]
    jsonschema.validate(answer.content[1].input, SCHEMA)  # type: ignore[union-attr]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    bias = {str(text.tokenizer.token_id(CLOSE)): 4.0}
    response = client.responses.create(model="tiny", input="?", text=form, extra_body={"logit_bias": bias, "seed": 1})
    assert [item.type for item in response.output] == ["reasoning", "message"]
    jsonschema.validate(json.loads(response.output_text), SCHEMA)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "format": SCHEMA, "think": True,
            "stream": False, "options": {"seed": 3, "num_predict": 500, "temperature": 1}}  # fmt: skip
    told = httpx.post(f"{url}/api/chat", json=body, timeout=120).json()
    assert told["done_reason"] in ("stop", "length") and told["message"]["thinking"]
    if told["done_reason"] == "stop":
        jsonschema.validate(json.loads(told["message"]["content"]), SCHEMA)
