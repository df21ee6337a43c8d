"""schemathesis over the served OpenAPI document: what it says is true, and what it forbids is refused in good form.

Bodies name the served model where they name any: a stranger's name would end most requests before they begin.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from fake_frontend import FakeFrontend
from hypothesis import HealthCheck, given, reject, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.errors import InvalidSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
FORM = "multipart/form-data"
TEXT = {"type": "string", "minLength": 1}
OPENAI = {
    "type": "object",
    "required": ["message", "type", "param", "code"],
    "additionalProperties": False,
    "properties": {
        "message": TEXT,
        "type": TEXT,
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    },
}
SHAPES: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {"type": {"const": "error"}, "error": {"type": "object", "required": ["type", "message"]}},
    },
    "/api/": {"type": "object", "required": ["error"], "additionalProperties": False, "properties": {"error": TEXT}},
    "/": {"type": "object", "required": ["error"], "additionalProperties": False, "properties": {"error": OPENAI}},
}


def check_shape(path: str, response: Any) -> None:
    """Every refusal has the shape of its own API."""
    if response.status_code >= 400:
        shape = next(shape for prefix, shape in SHAPES.items() if path.startswith(prefix))
        jsonschema.validate(response.json(), shape)


@st.composite
def drawn(draw: Any, strategy: Any) -> Any:
    """A case; the generator cannot follow some of its own mutations of a schema, and says so only now."""
    try:
        return draw(strategy)
    except InvalidSchema:
        reject()


def _has_list(body: Any) -> bool:
    """A form's list of one is that one, and a list of none no field: what is wrong with them is not sent."""
    return isinstance(body, dict) and any(isinstance(value, list) for value in body.values())


def _many(strategy: Any, mode: GenerationMode, examples: int, seen: Counter[str]) -> None:
    @seed(5)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=drawn(strategy))
    def check(case: Any) -> None:
        named = case.body.get("model") if isinstance(case.body, dict) else None
        if isinstance(named, str) and len(named) <= 256:
            case.body["model"] = FakeFrontend.model_name
        response = case.call()
        seen[f"{mode.value} {response.status_code // 100}xx"] += 1
        seen["cases"] += 1
        check_shape(case.operation.path, response)
        wrong = mode is GenerationMode.NEGATIVE and not (case.media_type == FORM and _has_list(case.body))
        case.validate_response(response, checks=CHECKS + [negative_data_rejection] * wrong)

    check()


def walk(url: str, examples: int) -> Counter[str]:
    """So many cases of either kind for every operation of the document; what became of them."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    schema.config.update(base_url=url)
    seen: Counter[str] = Counter()
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path == "/view":
            continue  # streamed, it has no end
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
                continue  # without input, or with any text as input, there is no wrong one
            with suppress(Unsatisfiable):
                _many(operation.as_strategy(generation_mode=mode), mode, examples, seen)
    assert httpx.get(f"{url}/health").status_code == 200
    return seen


@pytest.mark.slow
def test_a_short_walk(fake_server: str) -> None:
    seen = walk(fake_server, 5)
    assert seen["cases"] >= 200 and seen["positive 2xx"] >= 50 and seen["negative 4xx"] >= 50
    assert not seen["positive 5xx"] and not seen["negative 5xx"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_long_walk(fake_server: str) -> None:
    seen = walk(fake_server, 120)
    print(dict(seen))
    assert seen["cases"] >= 5000 and not seen["positive 5xx"] and not seen["negative 5xx"]
