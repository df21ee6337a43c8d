"""Prompts: values that grow. Adding a hole starts the model at once and gives a new prompt; reading it waits.

    base = model + user("Name a fruit.")
    one, other = base + gen("fruit"), base + gen("fruit")      # both are under way
    print(one["fruit"], other["fruit"])                        # now they are awaited

A prompt never changes, so using one twice is a fork, and what both have in common is computed once. Refuses to know:
what runs the model.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol, TypeVar, overload

from msgspec.structs import replace as changed

from quire.lang.backend import Answer, Backend, choosing
from quire.lang.pieces import Atom, Begin, Chunk, End, Gen, Hole, Join, Piece, Select, atoms
from quire.lang.state import State, Transcript, Usage
from quire.types.errors import InputError
from quire.types.request import HOLD
from quire.types.sampling_params import MAX_N, SamplingParams

T = TypeVar("T")


class Home(Protocol):
    """Where prompts live: a backend, and a loop that works for it."""

    backend: Backend

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]: ...

    def wait(self, future: Future[T]) -> T:
        """The result, when it is there; refuses to block the loop that is to bring it about."""
        ...


class Prompt:
    """A text or a chat so far, with the holes in it. `prompt + piece` is another prompt."""

    def __init__(self, home: Home, base: Future[State], tail: tuple[Atom, ...] = (), path: tuple[int, ...] = ()):
        self.home = home
        self._base = base  # up to the last hole
        self._tail = tail  # what follows it
        self._path = path  # which branch of which fork; seeds differ by it

    def __add__(self, piece: Piece) -> Prompt:
        prompt = self
        for atom in atoms(piece):
            prompt = prompt._with(atom)
        return prompt

    def _with(self, atom: Atom) -> Prompt:
        if isinstance(atom, Gen | Select):
            return self._after(self.home.start(self._fill(atom)))
        return Prompt(self.home, self._base, (*self._tail, atom), self._path)

    def _after(self, base: Future[State]) -> Prompt:
        return Prompt(self.home, base, (), self._path)

    def session(self, name: str, seconds: float = HOLD) -> Prompt:
        """This prompt, whose pages and those of its answers stay for so long after each hole, while a tool runs. One
        prompt at a time holds a name: whichever was answered last."""

        async def held() -> State:
            return replace(await asyncio.wrap_future(self._base), session=(name, seconds))

        return Prompt(self.home, self.home.start(held()), self._tail, self._path)

    def fork(self, count: int) -> Forks:
        """So many branches of this prompt, to be added to one by one or all at once."""
        if count < 1:
            raise InputError(f"a fork has at least one branch, not {count}", param="count")
        return Forks([Prompt(self.home, self._base, self._tail, (*self._path, i)) for i in range(count)], whole=self)

    # ---- reading -----------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        """What the model put into the hole `name`."""
        return _named(self._state().values, name)

    def __contains__(self, name: str) -> bool:
        return name in self._state().values

    def scores(self, name: str) -> Mapping[str, float]:
        """Mean log-probability per token of each option of a select."""
        return _named(self._state().scores, name)

    @property
    def text(self) -> str:
        """What was said in the last turn; of a prompt without turns, all of it."""
        return self._said().text

    @property
    def messages(self) -> list[dict[str, str]]:
        return self._said().messages if self._said().chat else []

    @property
    def tokens(self) -> tuple[int, ...]:
        """The exact tokens up to the last hole's end."""
        return self._state().tokens

    @property
    def usage(self) -> Usage:
        """What the calls behind this prompt have cost, those of its forebears included."""
        return self._state().usage

    @property
    def last_usage(self) -> Usage:
        """What filling the last hole has cost; what branches cost together is told by the first of them."""
        return self._state().last_usage

    def __str__(self) -> str:
        said = self._said()
        return "\n".join(f"{m['role']}: {m['content']}" for m in said.messages) if said.chat else said.text

    def __await__(self) -> Generator[Any, None, Prompt]:
        """In asyncio: wait, so that reading does not."""
        yield from asyncio.shield(asyncio.wrap_future(self._base)).__await__()
        for atom in self._tail:
            if isinstance(atom, Join):
                for prompt in atom.prompts:
                    yield from prompt.__await__()
        return self

    def _state(self) -> State:
        return self.home.wait(self._base)

    def _said(self) -> Transcript:
        said = self._state().transcript
        for atom in self._tail:
            said = _tell(said, atom)
        return said

    # ---- on the loop -------------------------------------------------------------------------------------------

    async def state(self) -> State:
        """Where this prompt stands, ready to be gone on from: for whoever works on its loop, as backends do."""
        await self
        said = self._said()
        return await self.home.backend.settle(replace(self._state(), transcript=said.say("")))

    async def _fill(self, hole: Hole) -> State:
        state = await self.state()
        if isinstance(hole, Gen):
            return await _generated(self.home.backend, state, hole, _seeded(hole.params, self._path))
        return await _selected(self.home.backend, state, hole)

    async def _fill_twins(self, hole: Gen, count: int) -> list[State]:
        state = await self.state()
        params = changed(_seeded(hole.params, self._path), n=count)
        answers = await self.home.backend.generate(state, params)
        return [_held(state, hole, answer) for answer in answers]


class Forks(Sequence[Prompt]):
    """Branches of a prompt. Adding to them adds to each; a hole added to branches that are still the same becomes one
    request with so many branches. `forks[name]` lists their values."""

    def __init__(self, prompts: Sequence[Prompt], whole: Prompt | None = None):
        self._prompts = list(prompts)
        self._whole = whole  # what all of them are, as long as they are the same

    def __add__(self, piece: Piece) -> Forks:
        forks = self
        for atom in atoms(piece):
            forks = forks._with(atom)
        return forks

    def _with(self, atom: Atom) -> Forks:
        whole = self._whole
        if isinstance(atom, Gen) and whole is not None and 1 < len(self) <= MAX_N and atom.params.n == 1:
            home = whole.home
            group = home.start(whole._fill_twins(atom, len(self)))
            return Forks([prompt._after(home.start(_one_of(group, i))) for i, prompt in enumerate(self)])
        same = whole._with(atom) if whole is not None and not isinstance(atom, Gen | Select) else None
        return Forks([prompt._with(atom) for prompt in self], whole=same)

    @overload
    def __getitem__(self, key: int) -> Prompt: ...
    @overload
    def __getitem__(self, key: slice) -> Forks: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | slice | str) -> Prompt | Forks | list[Any]:
        if isinstance(key, str):
            return [prompt[key] for prompt in self._prompts]
        return Forks(self._prompts[key]) if isinstance(key, slice) else self._prompts[key]

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def __await__(self) -> Generator[Any, None, Forks]:
        for prompt in self._prompts:
            yield from prompt.__await__()
        return self


async def _one_of(group: Future[list[State]], index: int) -> State:
    return (await asyncio.shield(asyncio.wrap_future(group)))[index]


async def _generated(backend: Backend, state: State, hole: Gen, params: SamplingParams) -> State:
    (answer, *_) = await backend.generate(state, params)
    return _held(state, hole, answer)


def _held(state: State, hole: Gen, answer: Answer) -> State:
    """The state after an answer, which must keep to its constraint even if it was cut off."""
    if answer.cut and hole.holds is not None and not hole.holds(answer.text):
        raise InputError(
            f"the hole {hole.name!r} was cut off after {hole.params.max_tokens} tokens, before what it holds was "
            "complete; raise its max_tokens, or bound its constraint",
            param="max_tokens",
        )
    after = state.said(answer.text, answer.tokens, answer.covered, answer.usage)
    return after.holding(hole.name, hole.value(answer.text))


async def _selected(backend: Backend, state: State, hole: Select) -> State:
    if hole.by == "grammar":
        (answer,) = await backend.generate(state, choosing("choice", hole.options, temperature=hole.temperature))
        return state.said(answer.text, answer.tokens, answer.covered, answer.usage).holding(hole.name, answer.text)
    answers = await backend.spell(state, hole.options)
    scores = {a.text: sum(a.logprobs) / max(1, len(a.logprobs)) for a in answers}
    best = max(answers, key=lambda answer: scores[answer.text])
    after = state.said(best.text, best.tokens, best.covered, sum((a.usage for a in answers), Usage()))
    return after.holding(hole.name, best.text, scores)


def probabilities(scores: Mapping[str, float]) -> dict[str, float]:
    """Scores of a select as shares of one."""
    top = max(scores.values())
    weights = {option: math.exp(score - top) for option, score in scores.items()}
    return {option: weight / sum(weights.values()) for option, weight in weights.items()}


def _tell(said: Transcript, atom: Atom) -> Transcript:
    if isinstance(atom, str):
        return said.say(atom)
    if isinstance(atom, Chunk):
        return said.say(atom.text, chunk=True)
    if isinstance(atom, Begin):
        return said.begin(atom.role)
    if isinstance(atom, End):
        return said.end()
    assert isinstance(atom, Join), "holes are filled, not told"
    return said.say("".join(atom.each.format(prompt[atom.name]) for prompt in atom.prompts))


def _seeded(params: SamplingParams, path: tuple[int, ...]) -> SamplingParams:
    """Branches of a fork draw differently even from one seed, and the same whenever they are run."""
    if params.seed is None or not path:
        return params
    digest = hashlib.blake2b(repr((params.seed, path)).encode(), digest_size=7).digest()
    return changed(params, seed=int.from_bytes(digest))


def _named(found: Mapping[str, T], name: str) -> T:
    if name not in found:
        known = ", ".join(found) or "none"
        raise InputError(f"this prompt has no hole {name!r}; it has: {known}", param="name")
    return found[name]
