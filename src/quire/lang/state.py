"""How far a prompt has got: what was said, by whom, and the exact tokens of it.

Tokens that a model has seen stay as they are: what comes after is encoded alone and put behind them, so that a prompt
that goes on, or forks, finds its pages. Refuses to know: holes, engines, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from quire.types.errors import InputError

_MARK = "\x02"  # where a turn that is not the assistant's breaks off
_EDGE = "\x03"  # around chunks


@dataclass(frozen=True)
class Transcript:
    """Turns of a chat, or one text without a role. The last turn is open while text may be added to it."""

    turns: tuple[tuple[str, str], ...] = ()
    open: bool = False
    implied: bool = False  # the open turn is the assistant's because nobody said otherwise
    chunks: tuple[tuple[int, int, int], ...] = ()  # (turn, start, end) of what may be reused wherever it stands

    @property
    def chat(self) -> bool:
        return bool(self.turns) and bool(self.turns[0][0])

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": role, "content": text} for role, text in self.turns]

    @property
    def text(self) -> str:
        """What was said in the last turn."""
        return self.turns[-1][1] if self.turns else ""

    def begin(self, role: str) -> Transcript:
        if self.open and not self.implied:
            what = f"a {self.turns[-1][0]} turn" if self.chat else "plain text"
            raise InputError(f"a {role} turn cannot begin inside {what}; start it on a prompt of its own")
        return Transcript((*self.turns, (role, "")), open=True, chunks=self.chunks)

    def end(self) -> Transcript:
        return Transcript(self.turns, chunks=self.chunks)

    def say(self, text: str, *, chunk: bool = False) -> Transcript:
        """Text goes to the open turn; where a chat has none, to a new one of the assistant's."""
        if not self.open:
            turns = (*self.turns, ("assistant" if self.chat else "", ""))
            return replace(self, turns=turns, open=True, implied=self.chat).say(text, chunk=chunk)
        *before, (role, said) = self.turns
        chunks = (*self.chunks, (len(before), len(said), len(said + text))) if chunk and text else self.chunks
        return replace(self, turns=(*before, (role, said + text)), chunks=chunks)

    def marked(self) -> Transcript:
        """With a mark on either side of every chunk."""
        turns = [list(turn) for turn in self.turns]
        if self.chunks and any(_EDGE in text for _, text in turns):
            raise InputError(f"a prompt with chunks may not have the character {_EDGE!r} in it")
        for turn, start, end in reversed(self.chunks):
            text = turns[turn][1]
            turns[turn][1] = f"{text[:start]}{_EDGE}{text[start:end]}{_EDGE}{text[end:]}"
        return replace(self, turns=tuple((role, text) for role, text in turns))


@dataclass(frozen=True)
class Usage:
    """What the calls behind a prompt have cost, from its beginning."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts' tokens, those whose pages were there already
    output_tokens: int = 0
    blended_tokens: int = 0  # of the prompts' tokens, those of chunks that came from another place

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.blended_tokens + other.blended_tokens,
        )


@dataclass(frozen=True)
class State:
    transcript: Transcript = Transcript()
    tokens: tuple[int, ...] = ()  # those that stand, and
    text: str = ""  # the text of exactly these
    chunks: tuple[tuple[int, int], ...] = ()  # [start, end) of these tokens
    values: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    usage: Usage = Usage()
    last_usage: Usage = Usage()
    session: tuple[str, float] | None = None  # under which name, and how many seconds, its pages stay after each call

    def said(self, text: str, tokens: Sequence[int], covered: str, usage: Usage) -> State:
        """After the model said `text`; `tokens` are exactly its beginning `covered`."""
        return replace(
            self,
            transcript=self.transcript.say(text),
            tokens=(*self.tokens, *tokens),
            text=self.text + covered,
            usage=self.usage + usage,
            last_usage=usage,
        )

    def holding(self, name: str, value: Any, scores: Mapping[str, float] | None = None) -> State:
        if not name:
            return self
        known = {**self.scores, name: scores} if scores is not None else self.scores
        return replace(self, values={**self.values, name: value}, scores=known)


class Scribe(Protocol):
    """Who knows a model's chat template and tokenizer."""

    async def render(self, messages: list[dict[str, str]], generation: bool) -> str: ...

    async def encode(self, text: str, *, first: bool, special: bool) -> list[int]:
        """Token ids of a text: the `first`, or one that goes on from another; `special`: with BOS, if there is one."""
        ...


async def settle(state: State, scribe: Scribe) -> State:
    """The state with tokens for all that was said. Where the chat template keeps what it wrote before, tokens that
    stand are kept; where it rewrites the past (drops a thought, trims), all is encoded anew."""
    parts = (await _written(state.transcript.marked(), scribe)).split(_EDGE)  # every other one is a chunk
    full = "".join(parts)
    if not (state.tokens and full.startswith(state.text)):
        state = replace(state, tokens=(), text="", chunks=())
    tokens, chunks, end = [*state.tokens], [*state.chunks], 0
    for number, part in enumerate(parts):
        start, end = end, end + len(part)
        rest = part[max(0, len(state.text) - start) :]
        if not rest and (full or number):
            continue
        first = not tokens
        more = await scribe.encode(rest, first=first, special=first and not state.transcript.chat)
        if number % 2 and start >= len(state.text):
            chunks.append((len(tokens), len(tokens) + len(more)))
        tokens += more
    return replace(state, tokens=tuple(tokens), text=full, chunks=tuple(chunks))


async def _written(transcript: Transcript, scribe: Scribe) -> str:
    """A transcript as the model is to read it, broken off where its open turn is."""
    if not transcript.chat:
        return transcript.text
    *before, last = transcript.messages
    if last["role"] == "assistant":
        return await scribe.render(before, generation=True) + last["content"]
    marked = await scribe.render([*before, {**last, "content": last["content"] + _MARK}], generation=False)
    return marked[: marked.rindex(_MARK)]
