"""DSPy and LangChain programs over Quire: real ones, small. And what the adapters promise beyond plain calls."""

import warnings
from typing import Literal

import pytest

from quire.types.errors import InputError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quiet():
    """DSPy announces for each call that its next version wants something else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


class Counting:
    """A backend that notes what is asked of another."""

    def __init__(self, backend):
        self._backend = backend
        self.asked = []
        self.settle, self.stream = backend.settle, backend.stream

    async def generate(self, state, params):
        self.asked.append((state, params))
        return await self._backend.generate(state, params)


@pytest.fixture
def counted(either):
    plain = either.backend
    either.backend = Counting(plain)
    yield either
    either.backend = plain


def test_a_dspy_program(counted):
    import dspy

    from quire.lang.adapters.dspy import QuireLM

    class Triage(dspy.Signature):
        """Sort a message to a shop."""

        message: str = dspy.InputField()
        topic: Literal["delivery", "payment", "other"] = dspy.OutputField()
        urgent: bool = dspy.OutputField()

    class Desk(dspy.Module):
        def __init__(self):
            super().__init__()
            self.triage = dspy.Predict(Triage)

        def forward(self, messages):
            return [self.triage(message=message) for message in messages]

    lm = QuireLM(counted, max_tokens=200)
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        found = Desk()(["Where is my parcel?", "I paid twice!"])
        several = dspy.Predict(Triage, n=3, temperature=0.9)(message="Hello")
    assert all(one.topic in ("delivery", "payment", "other") and isinstance(one.urgent, bool) for one in found)
    assert len(several.completions.topic) == 3
    params = [params for _, params in counted.backend.asked]
    assert [p.n for p in params] == [1, 1, 3], "several completions are branches of one request"
    assert all(p.grammar is not None and p.grammar.kind == "json_schema" for p in params)
    assert lm.history[-1]["usage"]["completion_tokens"] > 0


async def test_dspy_in_asyncio(model):
    import dspy

    from quire.lang.adapters.dspy import QuireLM

    with dspy.context(lm=QuireLM(model, max_tokens=24), adapter=dspy.ChatAdapter()):
        assert (await dspy.settings.lm.acall("Say hello."))[0]


def test_a_langchain_program(counted):
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from pydantic import BaseModel, Field

    from quire.lang.adapters.langchain import ChatQuire

    class Recipe(BaseModel):
        dish: str = Field(max_length=30)
        minutes: int = Field(ge=1, le=600)

    llm = ChatQuire(model=counted, max_tokens=100)
    ask = ChatPromptTemplate.from_messages([("system", "You are a cook."), ("user", "A dish with {what}, in JSON.")])
    recipe = (ask | llm.with_structured_output(Recipe)).invoke({"what": "rice"})
    assert isinstance(recipe, Recipe) and 1 <= recipe.minutes <= 600
    tell = ask | llm.bind(max_tokens=12) | StrOutputParser()
    assert all(isinstance(text, str) and text for text in tell.batch([{"what": w} for w in ("milk", "eggs", "rice")]))
    raw = llm.with_structured_output({"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}},
                                      "required": ["a"], "additionalProperties": False}, include_raw=True)  # fmt: skip
    told = raw.invoke("A number.")
    assert told["parsed"]["a"] <= 9 and told["raw"].usage_metadata["output_tokens"] > 0


def test_langchain_branches_and_conversations(counted):
    from langchain_core.messages import AIMessage, HumanMessage

    from quire.lang.adapters.langchain import ChatQuire

    llm = ChatQuire(model=counted, max_tokens=12, n=4, temperature=0.9, seed=1)
    (several,) = llm.generate([[HumanMessage("Name a bird.")]]).generations
    assert len({choice.text for choice in several}) > 1 and counted.backend.asked[-1][1].n == 4
    chosen = several[2].text
    llm.invoke([HumanMessage("Name a bird."), AIMessage(chosen), HumanMessage("Where does it live?")])
    (first, _), (second, params) = counted.backend.asked
    assert second.tokens[: len(first.tokens)] == first.tokens, "it goes on from the tokens of the branch that was taken"
    assert params.n == 4
    picture = HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}])
    with pytest.raises(InputError, match="text only"):
        llm.invoke([picture])


async def test_langchain_in_asyncio(model):
    from quire.lang.adapters.langchain import ChatQuire

    llm = ChatQuire(model=model, max_tokens=8)
    assert (await llm.ainvoke("Say hello.")).content
    assert "".join([chunk.content async for chunk in llm.astream("Say hello.")])
