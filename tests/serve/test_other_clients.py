"""What people build with: langchain, litellm, dspy and instructor against a live server. Heavy installs: the extra
`clients`, which `make test-all` adds; without it these are skipped."""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, Field

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing is fetched from elsewhere
os.environ.setdefault("LITELLM_TELEMETRY", "False")

QUESTION = "What is the capital of France?"


class Capital(BaseModel):
    """A country's capital."""

    country: str = Field(max_length=12)
    city: str = Field(max_length=12)


@pytest.fixture
def model(live_server: str) -> str:
    return str(httpx.get(f"{live_server}/v1/models").json()["data"][0]["id"])


def test_langchain(live_server: str, model: str) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(
        base_url=f"{live_server}/v1", api_key="none", model=model, temperature=0, max_tokens=64
    )
    whole = chat.invoke(QUESTION)
    assert whole.content and whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == whole.content
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(Capital, method=method).invoke(QUESTION)
        assert isinstance(found, Capital)
    called = chat.bind_tools([Capital], tool_choice="required", parallel_tool_calls=False).invoke(QUESTION)
    assert called.tool_calls[0]["name"] == "Capital" and set(called.tool_calls[0]["args"]) == {"country", "city"}
    vectors = langchain_openai.OpenAIEmbeddings(
        base_url=f"{live_server}/v1", api_key="none", model=model, check_embedding_ctx_length=False
    ).embed_documents(["a", "b"])
    assert len(vectors) == 2 and len(vectors[0]) > 100


@pytest.mark.parametrize("family", ["openai", "anthropic", "ollama_chat"])
def test_litellm(live_server: str, model: str, family: str) -> None:
    litellm = pytest.importorskip("litellm")
    base = f"{live_server}/v1" if family == "openai" else live_server
    options: dict[str, Any] = {
        "model": f"{family}/{model}", "api_base": base, "api_key": "none", "max_tokens": 16, "temperature": 0,
        "messages": [{"role": "user", "content": QUESTION}],
    }  # fmt: skip
    whole = litellm.completion(**options)
    assert whole.choices[0].message.content and whole.usage.completion_tokens > 0
    parts = litellm.completion(**options, stream=True)
    assert (
        "".join(part.choices[0].delta.content or "" for part in parts).strip()
        == whole.choices[0].message.content.strip()
    )


def test_dspy(live_server: str, model: str) -> None:
    dspy = pytest.importorskip("dspy")

    def lm(**more: Any) -> Any:
        options = {
            "api_base": f"{live_server}/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 64,
            "cache": False,
        }
        return dspy.LM(f"openai/{model}", **options, **more)

    assert lm()(QUESTION)[0]
    # A model this small does not write JSON because it was asked to; an extension of ours binds it.
    schema = {**Capital.model_json_schema(), "additionalProperties": False}
    with dspy.context(lm=lm(extra_body={"guided_json": schema}), adapter=dspy.JSONAdapter()):
        answer = dspy.Predict("question -> country, city")(question=QUESTION)
    assert isinstance(answer.city, str) and isinstance(answer.country, str)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(live_server: str, model: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    import openai

    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{live_server}/v1", api_key="none"), mode=getattr(instructor.Mode, mode)
    )
    found = client.chat.completions.create(
        model=model, response_model=Capital, temperature=0, max_tokens=80, max_retries=0,
        messages=[{"role": "user", "content": QUESTION}],
    )  # fmt: skip
    assert isinstance(found, Capital)
