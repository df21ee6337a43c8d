"""Fields that a body does not have: other servers' extensions pass, misspellings are refused, the rest is named."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from fake_frontend import FakeFrontend

from quire.serve.core.known_extensions import ALIASES, IGNORED, KNOWN, MEANT
from quire.serve.http.field_tables import BODIES
from quire.serve.http.server import background_server
from quire.serve.http.unknown_fields import without_unknown
from quire.serve.openai.request_bodies import ChatRequest
from quire.types.errors import InputError
from quire.types.serving import ServeOptions

MODEL = FakeFrontend.model_name
CHAT = "/v1/chat/completions"
HEADER = "x-quire-ignored-fields"
USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [USER], "max_tokens": 2, **fields}


def post(url: str, path: str, body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body)


@pytest.mark.parametrize("owner", IGNORED)
def test_extensions_of_others_are_taken(fake_server: str, owner: str) -> None:
    body = chat(**{name: {"any": ["thing"]} for name in IGNORED[owner]})
    answer = post(fake_server, CHAT, body)
    assert answer.status_code == 200, answer.text
    wanted = sorted(set(IGNORED[owner]) - set(ChatRequest.__struct_fields__))[:32]
    assert len(answer.headers[HEADER].split(", ")) == len(wanted)


def test_what_nobody_has_is_ignored_and_named(fake_server: str) -> None:
    body = chat(zzz=1, stream_options={"x": 1}, stream=True)
    body["messages"] = [
        USER | {"mood": "good"},
        {"role": "assistant", "content": [{"type": "text", "text": "x", "q": 1}]},
    ]
    answer = post(fake_server, CHAT, body)
    assert answer.status_code == 200 and answer.text.startswith("data: {")
    assert answer.headers[HEADER] == "messages[].content[].q, messages[].mood, stream_options.x, zzz"
    assert HEADER not in post(fake_server, CHAT, chat()).headers


def test_names_in_the_header_cannot_break_it(fake_server: str) -> None:
    answer = post(fake_server, CHAT, chat(**{"a\r\nset-cookie: b": 1, "c,d": 1, "é" * 100: 1}))
    assert answer.headers[HEADER] == "?" * 64 + ", a??set-cookie:?b, c?d"
    assert "set-cookie" not in answer.headers
    many = post(fake_server, CHAT, chat(**{f"x{i}": 1 for i in range(1000)}))
    assert many.status_code == 200 and len(many.headers[HEADER].split(", ")) == 32


@pytest.mark.parametrize(
    ("change", "param", "near"),
    [
        ({"temprature": 0}, "temprature", "temperature"),
        ({"maxTokens": 3}, "maxTokens", "max_tokens"),
        ({"max_output_tokens": 3}, "max_output_tokens", "max_completion_tokens"),
        ({"stop_sequences": ["x"]}, "stop_sequences", "stop"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameter": {}}}]},
         "tools[].function.parameter", "parameters"),
        ({"messages": [{"role": "user", "content": "x", "contents": "y"}]}, "messages[].contents", "content"),
    ],
)  # fmt: skip
def test_misspellings_are_refused(fake_server: str, change: dict[str, Any], param: str, near: str) -> None:
    error = post(fake_server, CHAT, chat(**change)).json()["error"]
    assert (error["param"], error["code"]) == (param, "unknown_parameter")
    assert f"did you mean '{near}'?" in error["message"]


def test_a_misspelt_label_changes_nothing(fake_server: str) -> None:
    assert post(fake_server, CHAT, chat(safety_identifiers="a")).headers[HEADER] == "safety_identifiers"


def test_aliases_have_an_effect(fake_server: str, fake_frontend: FakeFrontend) -> None:
    body = {"model": MODEL, "messages": [USER], "n_predict": 3, "repeat_penalty": 1.5}
    answer = post(fake_server, CHAT, body)
    assert answer.json()["usage"]["completion_tokens"] == 3 and HEADER not in answer.headers
    assert fake_frontend.requests[-1].params.repetition_penalty == 1.5
    body = {"model": MODEL, "messages": [USER], "n_predict": -1}
    assert post(fake_server, CHAT, body).json()["choices"][0]["finish_reason"] == "stop"
    # Given twice, our own name counts.
    assert post(fake_server, CHAT, chat(n_predict=9)).json()["usage"]["completion_tokens"] == 2


def test_other_families(fake_server: str) -> None:
    body = {"model": MODEL, "messages": [USER], "max_tokens": 2, "betas": ["x"], "zzz": 1}
    answer = post(fake_server, "/v1/messages", body)
    assert answer.status_code == 200 and "zzz" in answer.headers[HEADER]
    assert "did you mean 'stop_sequences'" in post(fake_server, "/v1/messages", body | {"stop": ["x"]}).text
    body = {"model": MODEL, "prompt": "hi", "stream": False, "options": {"zzz": 1}}
    answer = post(fake_server, "/api/generate", body)
    assert answer.status_code == 200 and answer.headers[HEADER] == "options.zzz"


def test_values_are_moved_not_read() -> None:
    number = "123456789012345678901234567890"
    body = b'{"zzz": 1, "model": "m", "messages": [], "guided_json": {"const": %b, "a": 1.10}}' % number.encode()
    pruned, ignored = without_unknown(body, ChatRequest)
    assert ignored == ["zzz"]
    assert b'"guided_json":{"const": %b, "a": 1.10}' % number.encode() in pruned


def test_strict_fields_refuses_them_all() -> None:
    options = ServeOptions(port=0, grace=1, strict_fields=True)
    with background_server(FakeFrontend, options) as url:  # type: ignore[arg-type]
        for change in ({"zzz": 1}, {"provider": {}}, {"n_predict": 1}):
            error = post(url, CHAT, chat(**change)).json()["error"]
            assert error["param"] == next(iter(change)) and error["code"] == "unknown_parameter"
        schemas = httpx.get(f"{url}/openapi.json").json()["components"]["schemas"]
        assert schemas["ChatRequest"]["additionalProperties"] is False


def test_the_document_says_so(fake_server: str) -> None:
    schemas = httpx.get(f"{fake_server}/openapi.json").json()["components"]["schemas"]
    assert "additionalProperties" not in schemas["ChatRequest"]


def test_the_table_names_nothing_twice_and_no_field_of_ours() -> None:
    fields = {name for body in BODIES.values() for name in body.__struct_encode_fields__}
    ours = {alias.name for aliases in ALIASES.values() for alias in aliases} | {
        n for names in MEANT.values() for n in names
    }
    assert ours <= fields | {"whitespace_pattern"}
    assert len([name for names in IGNORED.values() for name in names]) == len(KNOWN - ALIASES.keys())


@pytest.mark.parametrize("title", BODIES)
def test_every_body_has_a_shape(title: str) -> None:
    """Whatever the types of a body's fields, a stranger is found in it."""
    body = BODIES[title]
    pruned, ignored = without_unknown(b'{"qqqqqq": {"a": [1]}}', body)
    assert (pruned, ignored) == (b"{}", ["qqqqqq"])
    with pytest.raises((InputError, msgspec.ValidationError)):
        msgspec.json.decode(b'{"qqqqqq": 1}', type=body)
