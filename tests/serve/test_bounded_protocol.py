"""The wire, byte by byte, over the fake frontend: streams, errors, limits, hang-ups."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from typing import Any, get_type_hints

import httpx
import pytest
from fake_frontend import CONTEXT, FakeFrontend
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from prometheus_client.parser import text_string_to_metric_families

from quire.serve.core.fields import fields_of
from quire.serve.openai.request_bodies import ChatRequest, CompletionRequest

REFUSED = {field.name: field.neutral for field in fields_of(ChatRequest) if field.kind == "refused"}

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODEL = FakeFrontend.model_name


@pytest.fixture
def http(fake_server: str, fake_frontend: FakeFrontend) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fake_server, timeout=30) as client:
        yield client
        assert client.post(COMPLETIONS, json=completion()).status_code == 200  # whatever happened, it still serves
    assert fake_frontend.open == 0


def chat(content: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def completion(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return body["error"]  # type: ignore[no-any-return]


def events_of(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    response = http.post(path, json={**body, "stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


# ---- streams ------------------------------------------------------------------------------------------------


def test_chat_events(http: httpx.Client) -> None:
    events = events_of(http, CHAT, chat(max_tokens=4, temperature=0, stream_options={"include_usage": True}))
    *chunks, last = events
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert len({(chunk["id"], chunk["created"], chunk["system_fingerprint"]) for chunk in events}) == 1
    # "€g": the first character is three tokens, shown when the third is in.
    first = {"index": 0, "delta": {"role": "assistant", "content": "€"}, "logprobs": None, "finish_reason": None}
    final = {"index": 0, "delta": {"content": "g"}, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert [chunk["choices"] for chunk in chunks] == [[first], [final]]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


def test_completion_events_without_usage(http: httpx.Client) -> None:
    events = events_of(http, COMPLETIONS, completion(max_tokens=4, temperature=0, echo=True))
    assert [event["choices"][0]["text"] for event in events] == ["hello€", "g"]
    assert all("usage" not in event and event["object"] == "text_completion" for event in events)


def test_usage_tells_which_guesses_were_right(http: httpx.Client) -> None:
    usage = http.post(COMPLETIONS, json=completion(max_tokens=6, temperature=0)).json()["usage"]
    details = usage["completion_tokens_details"]
    assert usage["completion_tokens"] == 6
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (4, 2)


def test_logprobs_of_half_characters(http: httpx.Client) -> None:
    body = completion(max_tokens=4, temperature=0, logprobs=6)
    whole = http.post(COMPLETIONS, json=body).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "g"]
    assert whole["text_offset"] == [0, 0, 0, 1]
    assert whole["top_logprobs"][3]["l"] == -9999.0  # minus infinity has no place in JSON
    streamed = [event["choices"][0]["logprobs"] for event in events_of(http, COMPLETIONS, body)]
    assert [offset for piece in streamed for offset in piece["text_offset"]] == [0, 0, 0, 1]


def test_echo_with_logprobs_streams_the_prompts_scores_for_every_choice(http: httpx.Client) -> None:
    body = completion("ab", max_tokens=1, temperature=0, logprobs=0, echo=True, n=2)
    events = events_of(http, COMPLETIONS, body)
    assert [event["choices"][0]["logprobs"]["token_logprobs"] for event in events] == [[None, -0.5, -0.5]] * 2


def test_what_waited_together_is_sent_together(http: httpx.Client) -> None:
    events = events_of(http, CHAT, chat("burst", n=2, seed=1))
    assert [event["choices"][0]["index"] for event in events] == [0, 1]
    whole = http.post(CHAT, json=chat(n=2, seed=1)).json()
    for event, choice in zip(events, whole["choices"], strict=True):
        assert event["choices"][0]["delta"]["content"] == choice["message"]["content"]
        assert event["choices"][0]["finish_reason"] == choice["finish_reason"] == "stop"


def test_failure_in_a_stream_is_its_last_event(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    for command, code in (("late-boom", "internal_error"), ("dead", "engine_dead"), ("aborted", "engine_dead")):
        events = events_of(http, COMPLETIONS, completion(command, temperature=0, logprobs=0))
        assert [bool(event.get("choices")) for event in events] == [True, True, False]
        assert events[-1]["error"]["code"] == code
        assert "secret" not in str(events)
        error_of(http.post(CHAT, json=chat(command)), 500 if command == "late-boom" else 503)


# ---- hanging up ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("prompts", [1, 3])
def test_hanging_up_aborts(
    http: httpx.Client, fake_server: str, fake_frontend: FakeFrontend, streaming: bool, prompts: int
) -> None:
    body = completion(["hang"] * prompts, stream=streaming, max_tokens=64, temperature=0, logprobs=0)
    caller = httpx.Client(base_url=fake_server, timeout=30)

    def call() -> None:
        with pytest.raises(httpx.TransportError), caller.stream("POST", COMPLETIONS, json=body) as response:
            response.read()

    if streaming:
        with caller.stream("POST", COMPLETIONS, json=body) as response:
            next(response.iter_bytes())
            assert all(fake_frontend.hanging.acquire(timeout=10) for _ in range(prompts))
        caller.close()
    else:
        thread = threading.Thread(target=call)
        thread.start()
        assert all(fake_frontend.hanging.acquire(timeout=10) for _ in range(prompts))
        _shut_down(caller)
        thread.join(10)
        caller.close()
    assert all(fake_frontend.aborted.acquire(timeout=10) for _ in range(prompts))


def _shut_down(client: httpx.Client) -> None:
    """Hang up while another thread waits for the answer."""
    import socket

    [connection] = client._transport._pool.connections  # type: ignore[attr-defined]
    connection._connection._network_stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


# ---- errors -------------------------------------------------------------------------------------------------

MALFORMED = {
    "nothing": b"",
    "truncated": b'{"model": "',
    "not json": b"model=x",
    "not utf-8": b'{"model": "\xff"}',
    "half a surrogate": b'{"model": "\\ud800"}',
    "array": b"[]",
    "null": b"null",
    "deep": b'{"tools": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "trailing": b'{"model": "x"} {}',
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_bodies(http: httpx.Client, path: str, body: bytes) -> None:
    error_of(http.post(path, content=body))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400, '"0.5"', "true", "[]"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "n", "seed", "max_tokens"])
def test_numbers_that_are_none(http: httpx.Client, field: str, number: str) -> None:
    body = json.dumps(chat())[:-1] + f', "{field}": {number}}}'
    error = error_of(http.post(CHAT, content=body))
    assert error["param"] == field
    assert len(error["message"]) < 1100


TOOL = {"type": "function", "function": {"name": "f"}}
BAD_FIELDS: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"model": MODEL}, "messages", "missing_required_parameter"),
    (CHAT, chat(use_beam_search=True, n=2, logit_bias={"3": 1}), "logit_bias", "invalid_value"),
    (CHAT, chat(use_beam_search=True, tools=[TOOL], tool_choice="required"), "use_beam_search", "invalid_value"),
    (CHAT, chat(length_penalty=1.5), "length_penalty", "invalid_value"),
    (CHAT, chat(allowed_token_ids=[999]), "allowed_token_ids", "invalid_value"),
    (CHAT, chat(max_tokens=0), "max_tokens", "invalid_value"),
    (CHAT, chat(max_token=3), "max_token", "unknown_parameter"),
    (CHAT, chat(None), "messages[0].content", "invalid_type"),
    (CHAT, chat(tool_choice="required"), "tool_choice", "invalid_value"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].function.name", "invalid_value"),
    (CHAT, chat(tools=[{"type": "magic", "custom": {"name": "f"}}]), "tools[0].type", "invalid_value"),
    (CHAT, chat(response_format={"type": "yaml"}), "response_format.type", "invalid_value"),
    (CHAT, chat(guided_regex="a", guided_choice=["b"]), "guided_choice", "invalid_value"),
    (CHAT, chat(guided_choice=[]), "guided_choice", "invalid_value"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "invalid_value"),
    (CHAT, chat([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type", "invalid_value"),
    (CHAT, {"model": MODEL, "messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "invalid_value"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options", "invalid_value"),
    (CHAT, chat(top_logprobs=1), "top_logprobs", "invalid_value"),
    (CHAT, chat(max_tokens=1, max_completion_tokens=1), "max_tokens", "invalid_value"),
    (CHAT, chat(logit_bias={"a": 1}), "logit_bias", "invalid_type"),
    (CHAT, chat(prompt_logprobs=1, stream=True), "prompt_logprobs", "invalid_value"),
    (CHAT, chat(stop=[""]), "stop", "invalid_value"),
    (CHAT, chat(stop_token_ids=[999]), "stop_token_ids", "invalid_value"),
    (CHAT, chat("x" * CONTEXT), "messages", "context_length_exceeded"),
    (COMPLETIONS, completion("x" * CONTEXT), "prompt", "context_length_exceeded"),
    (COMPLETIONS, completion(["a", 1]), "prompt", "invalid_value"),
    (COMPLETIONS, completion([1.5]), "prompt[0]", "invalid_type"),
    (COMPLETIONS, completion([2**70]), "prompt[0]", "invalid_value"),
    (COMPLETIONS, completion(["a"] * 2049), "prompt", "invalid_value"),
    (COMPLETIONS, completion(best_of=2, stream=True), "best_of", "invalid_value"),
    (COMPLETIONS, completion(best_of=1, n=2), "best_of", "invalid_value"),
    (COMPLETIONS, completion(suffix="x"), "suffix", "unsupported_parameter"),
    (COMPLETIONS, completion(min_tokens=9, max_tokens=3), "min_tokens", "invalid_value"),
]


@pytest.mark.parametrize(("path", "body", "param", "code"), BAD_FIELDS)
def test_errors_name_the_field(http: httpx.Client, path: str, body: dict[str, Any], param: str, code: str) -> None:
    error = error_of(http.post(path, json=body))
    assert (error["param"], error["code"]) == (param, code)


def test_misspelt_field_gets_a_hint(http: httpx.Client) -> None:
    assert "did you mean 'max_tokens'?" in error_of(http.post(CHAT, json=chat(max_token=3)))["message"]


def test_a_word_that_a_field_does_not_take_is_answered_with_those_it_takes(http: httpx.Client) -> None:
    alien = {"messages": [{"role": "odd", "content": "x"}]}
    for path, body, field, values in (
        (CHAT, chat(**alien), "messages[0].role", "system, developer, user, assistant, tool"),
        (CHAT, chat(response_format={"type": "odd"}), "response_format.type", "text, json_object, json_schema, "),
        (CHAT, chat(tool_choice="odd"), "tool_choice", "none, auto, required"),
        ("/api/chat", chat(**alien), "messages[0].role", "system, user, assistant, tool"),
        ("/v1/messages", chat(max_tokens=1, **alien), "messages[0].role", ""),
    ):
        said = http.post(path, json=body).json()["error"]
        assert f"{field}: unsupported value 'odd'; must be one of {values}" in str(said)


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
def test_huge_body(http: httpx.Client, declared: bool) -> None:
    size = (16 << 20) + 1
    content = b"x" * size if declared else (b"x" * (1 << 20) for _ in range(17))
    assert error_of(http.post(CHAT, content=content), 413)["code"] == "request_too_large"


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    assert "/v1/nothing" in error_of(http.get("/v1/nothing"), 404)["message"]
    error_of(http.get("/v1/models/"), 404)
    response = http.get(COMPLETIONS)
    assert "POST" in error_of(response, 405)["message"]
    assert response.headers["allow"] == "POST"


def test_queries_are_refused_in_the_same_shape(http: httpx.Client) -> None:
    assert error_of(http.get("/view", params={"stream": "perhaps"}))["param"] == "stream"
    assert error_of(http.get("/v1/files", params={"limit": "-1"}))["param"] == "limit"
    assert error_of(http.get("/v1/batches", params={"order": "up"}))["param"] == "order"


def test_overload_says_when_to_retry(http: httpx.Client) -> None:
    for streaming in (False, True):
        response = http.post(CHAT, json=chat("overloaded", stream=streaming))
        assert error_of(response, 503)["code"] == "overloaded"
        assert response.headers["retry-after"] == "3"


def test_unexpected_errors_go_to_the_log(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    for streaming in (False, True):
        with caplog.at_level(logging.ERROR, "quire.serve"):
            error = error_of(http.post(CHAT, json=chat("boom", stream=streaming)), 500)
        assert "secret" not in error["message"]
        record = caplog.records[-1]
        assert record.exc_info and "secret detail" in str(record.exc_info[1])
        assert record.args[0] in error["message"]  # type: ignore[index, operator]
        assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


# ---- the published API --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "published"),
    [
        (ChatRequest, chat_create_params.CompletionCreateParamsStreaming),
        (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
    ],
)
def test_every_published_field_is_known(ours: type[Any], published: type[Any]) -> None:
    assert set(get_type_hints(published)) <= set(ours.__struct_fields__)


@pytest.mark.parametrize("field", REFUSED)
def test_unsupported_fields_are_refused_unless_neutral(http: httpx.Client, field: str) -> None:
    for neutral in (None, *REFUSED[field]):
        assert http.post(CHAT, json=chat(max_tokens=1, **{field: neutral})).status_code == 200
    for value in ({"type": "json_object"}, True, "other"):
        error = error_of(http.post(CHAT, json=chat(**{field: value})))
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")


def test_neutral_fields_are_accepted(http: httpx.Client) -> None:
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "length_penalty": 1.0,
        "early_stopping": False,
    }
    nulls = dict.fromkeys(set(ChatRequest.__struct_fields__) - {"model", "messages", *fields})
    response = http.post(CHAT, json=chat(**fields, **nulls) | {"parallel_tool_calls": True})
    assert response.status_code == 200, response.text


def test_fields_reach_the_sampler(http: httpx.Client, fake_frontend: FakeFrontend) -> None:
    wanted: dict[str, Any] = {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": -0.3, "seed": -5, "stop_token_ids": [7], "bad_words": ["bad"],
        "ignore_eos": True, "min_tokens": 2, "max_tokens": 9, "skip_special_tokens": False, "prompt_logprobs": 2,
    }  # fmt: skip
    more = {"logit_bias": {"3": -1.5}, "stop": "x", "priority": -2, "cache_salt": "tenant"}
    answer = http.post(CHAT, json=chat(**wanted, **more, logprobs=True, top_logprobs=4)).json()
    request = fake_frontend.requests[-1]
    assert {name: getattr(request.params, name) for name in wanted} == wanted
    assert (request.params.logit_bias, request.params.stop, request.params.logprobs) == ({3: -1.5}, ["x"], 4)
    assert (request.priority, request.salt) == (-2, "tenant")
    assert len(answer["prompt_logprobs"]) == len(request.prompt)
    assert answer["prompt_logprobs"][0] is None


def test_chat_runs_to_the_end_of_the_context_by_default(http: httpx.Client, fake_frontend: FakeFrontend) -> None:
    http.post(CHAT, json=chat())
    assert fake_frontend.requests[-1].params.max_tokens is None
    http.post(CHAT, json=chat(add_generation_prompt=False, max_completion_tokens=3))
    assert fake_frontend.requests[-1].params.max_tokens == 3
    assert not bytes(fake_frontend.requests[-1].prompt).endswith(b"assistant: ")


def test_large_prompts_are_rendered_off_the_loop(http: httpx.Client, fake_frontend: FakeFrontend) -> None:
    fake_frontend.text.threads.clear()
    http.post(CHAT, json=chat("small"))
    assert fake_frontend.text.threads == {"quire-server"}
    error_of(http.post(CHAT, json=chat("x" * 100_000)))
    assert len(fake_frontend.text.threads) == 2


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "x" * 100_000})}}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": ""}] * 10_000},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [CALL]}]},
        {"chat_template_kwargs": {"n": list(range(50_000))}},
    ],
    ids=["messages", "arguments", "variables"],
)
def test_all_that_a_template_reads_counts_as_large(
    http: httpx.Client, fake_frontend: FakeFrontend, body: dict[str, Any]
) -> None:
    fake_frontend.text.threads.clear()
    http.post(CHAT, json={**chat(max_tokens=1), **body})
    assert fake_frontend.text.threads and "quire-server" not in fake_frontend.text.threads


# ---- operations ---------------------------------------------------------------------------------------------


def test_health_and_readiness(http: httpx.Client, fake_frontend: FakeFrontend) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").status_code == 200
    fake_frontend.client.alive = False
    try:
        assert error_of(http.get("/ready"), 503)["code"] == "engine_dead"
        assert http.get("/health").status_code == 200
        assert 'quire_engine_up{engine="0",model_name="org/fake"} 0.0' in http.get("/metrics").text
    finally:
        fake_frontend.client.alive = True


def test_metrics_after_requests(http: httpx.Client) -> None:
    def read() -> dict[str, float]:
        response = http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = text_string_to_metric_families(response.text)
        return {
            sample.name + sample.labels.get("finished_reason", ""): sample.value
            for family in families
            for sample in family.samples
        }

    before = read()
    http.post(COMPLETIONS, json=completion("abcd", max_tokens=5, ignore_eos=True, n=2))
    after = read()

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("vllm:prompt_tokens_total") == grown("quire_prompt_tokens_total") == 4
    assert grown("vllm:generation_tokens_total") == 10
    assert grown("vllm:request_success_totallength") == 2
    assert grown("vllm:time_to_first_token_seconds_count") == grown("quire_time_to_first_token_seconds_count") == 2
    assert grown("vllm:inter_token_latency_seconds_count") == 8
    assert grown("vllm:request_time_per_output_token_seconds_count") == 2
    assert grown("vllm:e2e_request_latency_seconds_count") == 1
    assert after["vllm:num_requests_running"] == 3
    assert after["vllm:num_requests_waiting"] == 2
    assert after["vllm:kv_cache_usage_perc"] == 0.25
    assert after["vllm:prefix_cache_hits_total"] / after["vllm:prefix_cache_queries_total"] == 0.25


def test_openapi_describes_the_bodies(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    assert "Extension" in json.dumps(schemas["ChatRequest"]["properties"]["min_p"])
    references = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert references <= set(schemas)
