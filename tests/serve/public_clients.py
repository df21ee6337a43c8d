"""Public clients of LLM servers, each reduced to four tasks: chat, stream, tools, structure.

Imports happen in the functions: a client that is not installed is one that is skipped. `tools` returns the name and the
arguments of a call; clients that cannot demand one are given a model that makes it (`FREE`).
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from pydantic import BaseModel, Field

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing is fetched from elsewhere
os.environ.setdefault("LITELLM_TELEMETRY", "False")
os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")

QUESTION = "What is the capital of France?"
SUM = "What is 2+2?"  # the answer has an end, for clients to whom running out of tokens is an error
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
LIMIT = 24  # tokens of an answer in words


class Capital(BaseModel):
    """A country's capital."""

    country: str = Field(max_length=12)
    city: str = Field(max_length=12)


SCHEMA = {**Capital.model_json_schema(), "additionalProperties": False}
FUNCTION = {"name": "note_capital", "description": "Notes a capital.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
Call = tuple[str, dict[str, Any]]


class Client:
    """`url` is the server's, `model` the name of what it serves."""

    package = ""  # to import

    def __init__(self, url: str, model: str):
        self.url = url
        self.model = model

    def chat(self) -> str:
        raise NotImplementedError

    def stream(self) -> list[str]:
        raise NotImplementedError

    def tools(self) -> Call:
        raise NotImplementedError

    def structure(self) -> dict[str, Any]:
        raise NotImplementedError


class OpenAIChat(Client):
    package = "openai"

    def _ask(self, **more: Any) -> Any:
        import openai

        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none")
        return client.chat.completions.create(model=self.model, messages=MESSAGES, temperature=0, **more)

    def chat(self) -> str:
        return str(self._ask(max_tokens=LIMIT).choices[0].message.content)

    def stream(self) -> list[str]:
        chunks = self._ask(max_tokens=LIMIT, stream=True)
        return [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]

    def tools(self) -> Call:
        found = self._ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
        function = found.choices[0].message.tool_calls[0].function
        return function.name, json.loads(function.arguments)

    def structure(self) -> dict[str, Any]:
        import openai

        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none")
        found = client.chat.completions.parse(
            model=self.model, messages=MESSAGES, temperature=0, response_format=Capital
        )
        assert found.choices[0].message.parsed is not None
        return found.choices[0].message.parsed.model_dump()


class OpenAIResponses(Client):
    package = "openai"

    @property
    def _client(self) -> Any:
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none").responses

    def chat(self) -> str:
        found = self._client.create(model=self.model, input=QUESTION, temperature=0, max_output_tokens=LIMIT)
        return str(found.output_text)

    def stream(self) -> list[str]:
        with self._client.stream(model=self.model, input=QUESTION, temperature=0, max_output_tokens=LIMIT) as events:
            return [event.delta for event in events if event.type == "response.output_text.delta"]

    def tools(self) -> Call:
        tool = {"type": "function", "strict": True, **FUNCTION}
        found = self._client.create(
            model=self.model, input=QUESTION, temperature=0, tools=[tool], tool_choice="required",
            parallel_tool_calls=False,
        )  # fmt: skip
        return found.output[0].name, json.loads(found.output[0].arguments)

    def structure(self) -> dict[str, Any]:
        found = self._client.parse(model=self.model, input=QUESTION, temperature=0, text_format=Capital)
        return dict(found.output_parsed.model_dump())


class Anthropic(Client):
    package = "anthropic"

    @property
    def _client(self) -> Any:
        import anthropic

        return anthropic.Anthropic(base_url=self.url, api_key="none").messages

    @property
    def _asked(self) -> dict[str, Any]:
        return {"model": self.model, "messages": MESSAGES, "extra_body": {"temperature": 0}}

    def chat(self) -> str:
        return str(self._client.create(max_tokens=LIMIT, **self._asked).content[0].text)

    def stream(self) -> list[str]:
        with self._client.stream(max_tokens=LIMIT, **self._asked) as stream:
            return list(stream.text_stream)

    def tools(self) -> Call:
        tool = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": SCHEMA}
        choice = {"type": "any", "disable_parallel_tool_use": True}
        found = self._client.create(max_tokens=100, tools=[tool], tool_choice=choice, **self._asked)
        return found.content[0].name, found.content[0].input

    def structure(self) -> dict[str, Any]:
        found = self._client.parse(max_tokens=100, output_format=Capital, **self._asked)
        return dict(found.parsed_output.model_dump())


class Ollama(Client):
    package = "ollama"

    def _ask(self, limit: int = LIMIT, **more: Any) -> Any:
        import ollama

        options = {"temperature": 0, "num_predict": limit}
        return ollama.Client(host=self.url).chat(model=self.model, messages=MESSAGES, options=options, **more)

    def chat(self) -> str:
        return str(self._ask().message.content)

    def stream(self) -> list[str]:
        return [part.message.content or "" for part in self._ask(stream=True)]

    def tools(self) -> Call:
        call = self._ask(100, tools=[TOOL]).message.tool_calls[0].function
        return call.name, dict(call.arguments)

    def structure(self) -> dict[str, Any]:
        return dict(json.loads(self._ask(100, format=SCHEMA).message.content))


class LangChain(Client):
    package = "langchain_openai"

    def _model(self, limit: int = LIMIT) -> Any:
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(base_url=f"{self.url}/v1", api_key="none", model=self.model, temperature=0, max_tokens=limit)

    def chat(self) -> str:
        return str(self._model().invoke(QUESTION).content)

    def stream(self) -> list[str]:
        return [str(chunk.content) for chunk in self._model().stream(QUESTION)]

    def tools(self) -> Call:
        bound = self._model(100).bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
        call = bound.invoke(QUESTION).tool_calls[0]
        return call["name"], call["args"]

    def structure(self) -> dict[str, Any]:
        found = self._model(100).with_structured_output(Capital, method="json_schema").invoke(QUESTION)
        return dict(found.model_dump())


class LiteLLM(Client):
    package = "litellm"
    family = "openai"

    def _ask(self, **more: Any) -> Any:
        import litellm

        base = f"{self.url}/v1" if self.family in ("openai", "hosted_vllm") else self.url
        return litellm.completion(
            model=f"{self.family}/{self.model}", api_base=base, api_key="none", temperature=0, messages=MESSAGES, **more
        )

    def chat(self) -> str:
        return str(self._ask(max_tokens=LIMIT).choices[0].message.content)

    def stream(self) -> list[str]:
        chunks = self._ask(max_tokens=LIMIT, stream=True)
        return [chunk.choices[0].delta.content or "" for chunk in chunks]

    def tools(self) -> Call:
        found = self._ask(max_tokens=100, tools=[TOOL], tool_choice="required")
        function = found.choices[0].message.tool_calls[0].function
        return function.name, json.loads(function.arguments)

    def structure(self) -> dict[str, Any]:
        found = self._ask(max_tokens=100, response_format=Capital)
        return dict(json.loads(found.choices[0].message.content))


class LiteLLMAnthropic(LiteLLM):
    family = "anthropic"


class LiteLLMOllama(LiteLLM):
    family = "ollama_chat"

    def tools(self) -> Call:
        found = self._ask(max_tokens=100, tools=[TOOL])  # Ollama's API cannot demand a call
        function = found.choices[0].message.tool_calls[0].function
        return function.name, json.loads(function.arguments)


class LiteLLMVllm(LiteLLM):
    family = "hosted_vllm"


class Instructor(Client):
    package = "instructor"

    def _ask(self, mode: str, **more: Any) -> Any:
        import instructor
        import openai

        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none")
        return instructor.from_openai(client, mode=getattr(instructor.Mode, mode)), {
            "model": self.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 100, "max_retries": 0, **more,
        }  # fmt: skip

    def chat(self) -> str:
        client, asked = self._ask("TOOLS", response_model=None, max_tokens=LIMIT)
        return str(client.chat.completions.create(**asked).choices[0].message.content)

    def stream(self) -> list[str]:
        """Objects that grow, each as text."""
        client, asked = self._ask("JSON_SCHEMA", response_model=Capital)
        del asked["max_retries"]
        grown = [part.model_dump_json() for part in client.chat.completions.create_partial(**asked)]
        Capital.model_validate_json(grown[-1])
        return grown

    def tools(self) -> Call:
        client, asked = self._ask("TOOLS", response_model=Capital)
        return str(FUNCTION["name"]), client.chat.completions.create(**asked).model_dump()

    def structure(self) -> dict[str, Any]:
        client, asked = self._ask("JSON_SCHEMA", response_model=Capital)
        return dict(client.chat.completions.create(**asked).model_dump())


class PydanticAI(Client):
    package = "pydantic_ai"

    def _agent(self, limit: int = LIMIT, **more: Any) -> Any:
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        provider = OpenAIProvider(base_url=f"{self.url}/v1", api_key="none")
        settings: Any = {"temperature": 0, "max_tokens": limit}
        return Agent(OpenAIChatModel(self.model, provider=provider), model_settings=settings, retries=0, **more)

    def chat(self) -> str:
        return str(asyncio.run(self._agent().run(QUESTION)).output)

    def stream(self) -> list[str]:
        async def parts() -> list[str]:
            async with self._agent().run_stream(QUESTION) as run:
                return [part async for part in run.stream_text(delta=True, debounce_by=None)]

        return asyncio.run(parts())

    def tools(self) -> Call:
        from pydantic_ai import ToolOutput

        output = ToolOutput(Capital, name=str(FUNCTION["name"]))
        run = asyncio.run(self._agent(100, output_type=output).run(QUESTION))
        return str(FUNCTION["name"]), run.output.model_dump()

    def structure(self) -> dict[str, Any]:
        from pydantic_ai import NativeOutput

        run = asyncio.run(self._agent(100, output_type=NativeOutput(Capital)).run(QUESTION))
        return dict(run.output.model_dump())


class OpenAIAgents(Client):
    package = "agents"
    responses = False

    def _agent(self, limit: int = LIMIT, **more: Any) -> Any:
        import openai
        from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel

        kind = OpenAIResponsesModel if self.responses else OpenAIChatCompletionsModel
        model = kind(self.model, openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none"))
        settings = ModelSettings(
            temperature=0, max_tokens=limit, tool_choice="required" if "tools" in more else None,
            parallel_tool_calls=False if "tools" in more else None,
        )  # fmt: skip
        return Agent(name="tester", instructions="Be brief.", model=model, model_settings=settings, **more)

    def chat(self) -> str:
        from agents import Runner

        return str(asyncio.run(Runner.run(self._agent(200), SUM)).final_output)

    def stream(self) -> list[str]:
        from agents import Runner

        async def parts() -> list[str]:
            run = Runner.run_streamed(self._agent(200), SUM)
            events = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
            return [event.delta for event in events if event.type == "response.output_text.delta"]

        return asyncio.run(parts())

    def tools(self) -> Call:
        from agents import Runner, function_tool

        calls: list[Call] = []

        @function_tool
        def note_capital(country: str, city: str) -> str:
            """Notes a capital."""
            calls.append(("note_capital", {"country": country, "city": city}))
            return "noted"

        # After the first call the choice is free again, which is the library's own doing: the loop ends by itself.
        asyncio.run(Runner.run(self._agent(200, tools=[note_capital]), QUESTION, max_turns=4))
        return calls[0]

    def structure(self) -> dict[str, Any]:
        from agents import Runner

        return dict(asyncio.run(Runner.run(self._agent(100, output_type=Capital), QUESTION)).final_output.model_dump())


class OpenAIAgentsResponses(OpenAIAgents):
    responses = True


class Outlines(Client):
    package = "outlines"

    def _model(self) -> Any:
        import openai
        import outlines

        return outlines.from_vllm(openai.OpenAI(base_url=f"{self.url}/v1", api_key="none"), self.model)

    def chat(self) -> str:
        return str(self._model()(QUESTION, max_tokens=LIMIT, temperature=0))

    def stream(self) -> list[str]:
        return list(self._model().stream(QUESTION, max_tokens=LIMIT, temperature=0))

    def structure(self) -> dict[str, Any]:
        from typing import Literal

        from outlines.types import CFG, Regex

        model = self._model()
        assert model(QUESTION, Literal["Paris", "Rome"], max_tokens=9, temperature=0) in ("Paris", "Rome")  # type: ignore[arg-type]
        assert model(QUESTION, Regex("[A-Z][a-z]{2,5}"), max_tokens=9, temperature=0).isalpha()
        assert model(QUESTION, CFG('start: "yes" | "no"'), max_tokens=9, temperature=0) in ("yes", "no")
        return dict(json.loads(model(QUESTION, Capital, max_tokens=100, temperature=0)))


class Llm(Client):
    package = "llm"

    def _ask(self, **more: Any) -> Any:
        from llm.default_plugins.openai_models import Chat

        model = Chat(
            self.model, model_name=self.model, api_base=f"{self.url}/v1", supports_schema=True, supports_tools=True
        )
        limit = more.pop("limit", LIMIT)
        return model.prompt(QUESTION, key="none", temperature=0, max_tokens=limit, **more)

    def chat(self) -> str:
        return str(self._ask(stream=False).text())

    def stream(self) -> list[str]:
        return list(self._ask())

    def tools(self) -> Call:
        import llm

        tool = llm.Tool(name=str(FUNCTION["name"]), description=str(FUNCTION["description"]), input_schema=SCHEMA)
        call = self._ask(limit=100, tools=[tool], stream=False).tool_calls()[0]
        return call.name, call.arguments

    def structure(self) -> dict[str, Any]:
        return dict(json.loads(self._ask(limit=100, schema=SCHEMA, stream=False).text()))


CLIENTS: dict[str, type[Client]] = {
    "openai (chat)": OpenAIChat,
    "openai (responses)": OpenAIResponses,
    "anthropic": Anthropic,
    "ollama": Ollama,
    "langchain-openai": LangChain,
    "litellm (openai)": LiteLLM,
    "litellm (anthropic)": LiteLLMAnthropic,
    "litellm (ollama)": LiteLLMOllama,
    "litellm (vllm)": LiteLLMVllm,
    "instructor": Instructor,
    "pydantic-ai": PydanticAI,
    "openai-agents (chat)": OpenAIAgents,
    "openai-agents (responses)": OpenAIAgentsResponses,
    "outlines": Outlines,
    "llm": Llm,
}
FREE = {"ollama", "litellm (ollama)", "llm"}  # they offer tools and cannot demand a call
