"""One assistant's turn, whichever API asked for it: messages and tools in; words, thoughts and calls out.

Every chat-like API turns its body into a `Turn` and reads the answer from `Talk`. Refuses to know: JSON, HTTP, any
API's names for things.
"""

from __future__ import annotations

import json as stdlib_json
from collections.abc import Container, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from quire.serve.core.generation import Generation, Serving, kept_tail, naming, off_loop, preparing, search
from quire.serve.core.request_warnings import warn
from quire.text import TextModel, Tool, ToolFormat, chat_prompt, encode_chunks
from quire.text.answer_reader import ChainedReader, Reader
from quire.text.segments import CallBegun, Said, Segment, Thought
from quire.text.text_inputs import TextCallReader
from quire.text.tool_calls import required_grammar, strict_grammar, tool_grammar
from quire.types.beam import BeamParams
from quire.types.blend import Blend, BlendParams
from quire.types.errors import ContextLengthError, InputError
from quire.types.grammar import GrammarSpec, ThoughtSpec
from quire.types.outputs import CompletionOutput, Delta
from quire.types.plan import TokenLogprobs
from quire.types.request import FinishReason
from quire.types.request import Request as EngineRequest
from quire.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.frontend import Frontend

THINKING_SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates
RESERVED = frozenset({"prefix", "messages", "tools", "add_generation_prompt"})


@dataclass
class ToolChoice:
    """`only` narrows the tools offered; `required` makes the model call one of them."""

    required: bool = False
    none: bool = False
    only: Sequence[str] | None = None
    parallel: bool = True


@dataclass
class Turn:
    """What the model is to continue, and how."""

    messages: list[dict[str, Any]]
    params: SamplingParams
    tools: list[Tool] = field(default_factory=list)
    choice: ToolChoice = field(default_factory=ToolChoice)
    variables: dict[str, Any] = field(default_factory=dict)  # for the chat template
    begin: bool = True  # the assistant's turn is opened; otherwise its last message is continued
    priority: int = 0
    salt: str = ""
    blend: BlendParams | None = None
    deadline_ms: int | None = None
    prediction: str = ""  # what the answer may turn out to be: drafts are taken from it
    beam: BeamParams | None = None  # answers are found by beam search; `params` says the rest
    keep_tokens: int | None = None  # of the prompt, its last so many; -1: as many as fit
    drop_oldest: bool = False  # messages go from the beginning until the rest fits
    prefix: str = ""  # the beginning of the answer, which the model goes on from
    raw: bool = False  # the last message is the prompt, as it is
    messages_param: str = "messages"  # what the API calls them
    constraint: str = ""  # what it calls the field that holds the grammar
    inline: Container[str] = ()  # tools that the conversation itself describes
    thinking_budget: int | None = None  # tokens of a thought, at which its end is forced

    def offered(self) -> list[Tool]:
        """The tools the model may call."""
        names = [tool.name for tool in self.tools]
        if len(names) > len(set(names)):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"two tools are called {twice!r}; names must differ", param="tools")
        choice = self.choice
        for name in choice.only or ():
            if name not in names:
                raise InputError(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
        if choice.required and not names:
            raise InputError("tool_choice requires a call but there are no tools", param="tool_choice")
        if choice.none:
            return []
        return [tool for tool in self.tools if choice.only is None or tool.name in choice.only]


def continued(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """(the conversation, the beginning of its answer): a last message of the assistant's is one to go on from."""
    if len(messages) > 1 and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        return messages[:-1], messages[-1]["content"]
    return messages, ""


class Call(NamedTuple):
    id: str
    name: str
    arguments: list[str]

    @property
    def text(self) -> str:
        return "".join(self.arguments)

    @property
    def input(self) -> dict[str, Any]:
        """The arguments as the object they should be; a call cut short has none."""
        try:
            value = stdlib_json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


def plain_call(id: str, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """A call as chat templates want it: arguments as an object, where they are one."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = stdlib_json.loads(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class Reply:
    """One answer: read as it comes, and kept. `output` is what the engine said of it, all but its text."""

    def __init__(self, index: int, reader: Reader | None, format: ToolFormat):
        self._reader = reader
        self._format = format
        self._said: list[str] = []
        self._thought: list[str] = []
        self.output = CompletionOutput(index=index, token_ids=[])
        self.plain = reader is None  # all its text is said
        self.calls: list[Call] = []
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.thought_tokens = 0

    @property
    def text(self) -> str:
        return "".join(self._said)

    @property
    def thought(self) -> str:
        return "".join(self._thought)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.output.finish_reason

    @property
    def tokens(self) -> int:
        return len(self.output.token_ids)

    @property
    def stop_reason(self) -> str | int | None:
        return self.output.stop_reason

    def push(self, delta: Delta) -> Sequence[Segment]:
        """What a delta says; keeps the rest of it too."""
        self.output.add(delta)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if self._reader is None:  # nearly always
            if not delta.text:
                return ()
            self._said.append(delta.text)
            return (Said(delta.text),)
        segments = self._reader.push(delta.text) + (self._reader.end() if delta.finish_reason is not None else [])
        for segment in segments:
            if isinstance(segment, Said):
                self._said.append(segment.text)
            elif isinstance(segment, Thought):
                self._thought.append(segment.text)
            elif isinstance(segment, CallBegun):
                id = segment.id or self._format.call_id(segment.name, segment.index)
                self.calls.append(Call(id, segment.name, []))
            else:
                self.calls[segment.index].arguments.append(segment.text)
        if self._thought and not self._said and not self.calls:
            self.thought_tokens += len(delta.token_ids)
        return segments


class Talk:
    """A turn under way: its deltas, and the reply of each choice that they are to be pushed to."""

    def __init__(self, generation: Generation, replies: list[Reply]):
        self.generation = generation
        self.replies = replies

    @property
    def request(self) -> EngineRequest:
        return self.generation.requests[0]

    async def whole(self) -> list[Reply]:
        async with aclosing(self.generation.deltas()) as batches:
            async for deltas in batches:
                for delta in deltas:
                    self.replies[delta.branch].push(delta)
        return self.replies

    def wanted(self) -> list[Reply]:
        """The replies to return: of more than were asked for, the likeliest."""
        if not self.request.keep:
            return self.replies
        return sorted(self.replies, key=lambda reply: -reply.output.likelihood)[: self.request.keep]

    def thought_tokens(self) -> int:
        return sum(reply.thought_tokens for reply in self.replies)


async def render(serving: Serving, turn: Turn) -> tuple[list[int], Blend | None]:
    """The conversation as token ids, and where its chunks are, in a thread if it is long."""
    if reserved := RESERVED & set(turn.variables):
        raise InputError(f"chat_template_kwargs may not set {min(reserved)!r}", param="chat_template_kwargs")
    offered = turn.offered()
    # A grammar holds a required call to the choice: the prompt, whose beginning stays cached, need not tell of it.
    told = turn.tools if turn.choice.required else offered
    tools = [tool.described() for tool in told if tool.name not in turn.inline]
    size = len(msgspec.json.encode((turn.messages, tools, turn.variables)))

    def work() -> tuple[list[int], Blend | None]:
        text = serving.frontend.text
        if turn.raw:
            prompt = turn.messages[-1]["content"]
            if turn.blend is None:
                return text.tokenizer.encode(prompt), None
            return encode_chunks(text.tokenizer, prompt, turn.blend, add_special=True)
        how = {"tools": tools, "add_generation_prompt": turn.begin, "prefix": turn.prefix, **_switched(turn.variables)}
        return chat_prompt(text, turn.messages, turn.blend, **how)

    with naming(prompt=turn.messages_param):
        return await off_loop(size, work)


def _switched(variables: dict[str, Any]) -> dict[str, Any]:
    """Whether to think, under both names that templates have for it."""
    known = {name: variables[name] for name in THINKING_SWITCHES if isinstance(variables.get(name), bool)}
    return {name: value for value in known.values() for name in THINKING_SWITCHES} | variables


async def start(serving: Serving, turn: Turn, id: str, arrived: float) -> Talk:
    """Render the conversation, tokenise it, check it; the work itself begins when the answer is read."""
    frontend, info = serving.frontend, serving.frontend.client.info
    tools = turn.offered()
    with naming(constraint="tools"):
        params = _bound(turn, tools, frontend.text)
    tokens, blend = await (_rendered_to_fit(serving, turn) if turn.drop_oldest else render(serving, turn))
    tokens = kept_tail(tokens, turn.keep_tokens, params, info)
    words = params.grammar is turn.params.grammar  # it is these that are bound, not calls
    constraint = turn.constraint if words else "tools"
    text_call = tools[0].name if tools and params.grammar is tools[0].grammar is not None else ""
    thought = _thought(turn, tokens, frontend.text)
    params = _behind_thought(params, thought, frontend.text.answer_lead if words else "")
    if turn.beam is not None and params.grammar is not None:
        what = "these tools" if params.grammar.kind != "free" else "a thinking budget"
        raise InputError(f"beam search knows no grammars, which {what} need", param="use_beam_search")

    unusable: list[str] = []

    def work() -> EngineRequest:
        where: dict[str, Any] = {"request_id": id, "priority": turn.priority, "salt": turn.salt}
        if turn.beam is not None:
            return search(frontend, tokens, turn.beam, params, **where)
        if turn.prediction:
            expected = frontend.text.tokenizer.encode_on(turn.prediction, parse_special=False)
            where["prediction"] = expected[: info.max_model_len]
        try:
            return frontend.prepare(tokens, params, blend=blend, **where)
        except InputError as error:
            if constraint != "tools" or error.code != "invalid_grammar" or len(tools) < 2:
                raise
            left = _without_unusable(frontend, tools, unusable)
            bound = _behind_thought(_bound(turn, left, frontend.text), thought)
            return frontend.prepare(tokens, bound, blend=blend, **where)

    with naming(prompt=turn.messages_param, constraint=constraint):
        request = await off_loop(preparing(len(tokens) + len(turn.prediction), params), work)
    for message in unusable:
        warn(message)
    schemas = {tool.name: tool.parameters for tool in tools}

    def reply(index: int) -> Reply:
        text = frontend.text
        thinks = thought is not None or params.grammar is None
        reader: Reader | None = text.answer_reader(request.prompt, schemas, turn.choice.parallel, thinks)
        if text_call:
            thoughts = text.reasoning_reader(request.prompt) if thinks else None
            reader = ChainedReader(thoughts, TextCallReader(text_call)) if thoughts else TextCallReader(text_call)
        return Reply(index, reader, text.tool_format)

    generation = Generation(serving, [request], arrived, turn.deadline_ms)
    return Talk(generation, [reply(index) for index in range(request.params.n)])


async def _rendered_to_fit(serving: Serving, turn: Turn) -> tuple[list[int], Blend | None]:
    """The conversation with as few of its oldest messages gone as it takes to fit: what the system said stays, and so
    does the latest message. A tool's answer goes with the call that asked for it."""
    room = serving.frontend.client.info.room(turn.params) - (turn.params.max_tokens or 1)
    head = [message for message in turn.messages if message["role"] == "system"]
    rest = [message for message in turn.messages if message["role"] != "system"]
    starts = [i for i, message in enumerate(rest) if i and message["role"] != "tool"]

    async def fitting(messages: list[dict[str, Any]]) -> tuple[list[int], Blend | None] | None:
        try:
            rendered = await render(serving, replace(turn, messages=messages))
        except ContextLengthError:
            return None
        return rendered if len(rendered[0]) <= room else None

    found = await fitting(turn.messages)
    low, high = 0, len(starts) - 1 if found is None else -1
    while low <= high:
        middle = (low + high) // 2
        if (shorter := await fitting(head + rest[starts[middle] :])) is not None:
            found, high = shorter, middle - 1
        else:
            low = middle + 1
    return found if found is not None else await render(serving, turn)


def _without_unusable(frontend: Frontend, tools: list[Tool], told: list[str]) -> list[Tool]:
    """Tools whose parameters no grammar can keep to take any object, which is told; the others stay bound."""
    found = []
    for tool in tools:
        try:
            frontend.check_grammar(tool_grammar(tool, frontend.text.tool_format, frontend.text.special_id))
            found.append(tool)
        except InputError as error:
            told.append(f"tool {tool.name}: its parameters are not enforced: {error}")
            found.append(msgspec.structs.replace(tool, bound=False))
    return found


def _thought(turn: Turn, prompt: list[int], text: TextModel) -> ThoughtSpec | None:
    """The thought that precedes the answer, if the model thinks here."""
    if turn.raw or turn.prefix or not turn.begin:
        return None
    off = any(turn.variables.get(name) is False for name in THINKING_SWITCHES)
    return text.thought(prompt, turn.thinking_budget, wanted=not off)


def _behind_thought(params: SamplingParams, thought: ThoughtSpec | None, lead: str = "") -> SamplingParams:
    """What holds for the answer begins behind the thought, and `lead`; a budget alone holds for the thought only."""
    grammar = params.grammar
    if grammar is None and (thought is None or thought.budget is None):
        return params
    made = msgspec.structs.replace(grammar or GrammarSpec("free"), thought=thought, lead=lead if grammar else "")
    return msgspec.structs.replace(params, grammar=made)


def _bound(turn: Turn, tools: list[Tool], text: TextModel) -> SamplingParams:
    """Parameters with the grammar that the choice of tools asks for. Marks that answers are read by stay in the text,
    which else leaves special tokens out."""
    params, format = turn.params, text.tool_format
    if text.hidden_marks(tools=bool(tools)):
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    if not tools:
        return params
    grammar = params.grammar
    if turn.choice.required and len(tools) == 1 and tools[0].grammar is not None and not format.lead:
        grammar = tools[0].grammar
    elif turn.choice.required:  # a constraint on words has nothing to hold on to then
        parallel = turn.choice.parallel and (turn.choice.only is None or len(turn.choice.only) > 1)
        grammar = required_grammar(tools, format, text.special_id, parallel=parallel)
    elif grammar is not None or any(tool.strict for tool in tools):
        grammar = strict_grammar(tools, format, text.special_id, grammar)
    return msgspec.structs.replace(params, grammar=grammar)
