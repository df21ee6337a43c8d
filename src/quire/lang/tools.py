"""A model that acts: it thinks, calls one of a few Python functions, reads the result, and so on until it answers.

The name of a tool is one of those there are, and its arguments fit its signature, because grammars see to both.
Refuses to know: engines, tokens, what tools do.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from quire.lang.pieces import gen, select, system, user
from quire.lang.prompt import Prompt
from quire.lang.reasoning import Start
from quire.types.errors import InputError

FINISH = "finish"
MAX_RESULT = 2000  # characters of a result that the model gets to read
Text = Annotated[str, msgspec.Meta(max_length=200)]  # a bare str among arguments: a small model may go on for ever


@dataclass(frozen=True)
class Step:
    thought: str
    tool: str
    arguments: dict[str, Any]
    result: str


@dataclass(frozen=True)
class Acted:
    answer: str
    finished: bool  # whether the model said so; if not, the steps ran out and it was made to answer
    steps: list[Step]
    prompt: Prompt


def react(
    start: Start,
    question: str,
    tools: Iterable[Callable[..., Any]],
    *,
    max_steps: int = 6,
    max_tokens: int = 64,
    temperature: float = 0.0,
) -> Acted:
    """Answer a question with the help of `tools`, functions whose parameters have types and whose docstrings say what
    they are for. What a tool raises is told to the model as its result."""
    known = {tool.__name__: (tool, _arguments(tool)) for tool in tools}
    if not known or FINISH in known:
        raise InputError(f"react needs at least one tool, and none called {FINISH!r}", param="tools")
    prompt = start + system(_manual(known)) + user(question)
    steps: list[Step] = []
    finished = False
    while not finished and len(steps) < max_steps:
        prompt += ["Thought: ", gen("thought", max_tokens=max_tokens, temperature=temperature, stop="\n")]
        prompt += ["\nAction: ", select("action", [*known, FINISH], by="grammar", temperature=temperature)]
        if finished := prompt["action"] == FINISH:
            prompt += "\n"
            continue
        tool, arguments = known[prompt["action"]]
        prompt += ["\nArguments: ", gen("arguments", schema=arguments, temperature=temperature)]
        given = msgspec.structs.asdict(prompt["arguments"])
        result = _called(tool, given)
        steps.append(Step(prompt["thought"], prompt["action"], given, result))
        prompt += f"\nResult: {result}\n"
    prompt += ["Answer: ", gen("answer", max_tokens=max_tokens, temperature=temperature, stop="\n")]
    return Acted(prompt["answer"], finished, steps, prompt)


def _called(tool: Callable[..., Any], arguments: dict[str, Any]) -> str:
    try:
        return str(tool(**arguments))[:MAX_RESULT]
    except Exception as error:  # a tool may raise anything, and the model may find a way round it
        return f"error: {error or type(error).__name__}"[:MAX_RESULT]


def _arguments(tool: Callable[..., Any]) -> type[msgspec.Struct]:
    """A struct with a tool's parameters for fields."""
    hints = typing.get_type_hints(tool, include_extras=True)
    fields: list[Any] = []
    for name, parameter in inspect.signature(tool).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InputError(f"{tool.__name__}: a tool takes named parameters only, not {parameter}", param="tools")
        kind = hints.get(name, str)
        field = (name, Text if kind is str else kind)
        fields.append(field if parameter.default is parameter.empty else (*field, parameter.default))
    return msgspec.defstruct(tool.__name__, fields, kw_only=True, forbid_unknown_fields=True)


def _manual(known: dict[str, tuple[Callable[..., Any], Any]]) -> str:
    lines = [
        f"- {name}{inspect.signature(tool)}: {inspect.getdoc(tool) or 'no description'}"
        for name, (tool, _) in known.items()
    ]
    return (
        "Answer the question step by step. In each step write a thought, an action and its arguments in JSON; you will "
        f"be told the result. The action is {FINISH} once you know the answer. Tools:\n" + "\n".join(lines)
    )
