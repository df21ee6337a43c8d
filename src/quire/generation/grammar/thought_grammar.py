"""A thought first, then an answer: the thought is free, and the grammar begins behind the mark that ends it.

    OPENING ──► THINKING ──► GAP ──► ANSWERING          OPENING: the model may think, or answer at once
                   └─ at its budget the mark is forced  GAP: white space before the answer

Where the answer has a grammar, nothing may end it within the thought. Without one, only the thought's budget holds.
Refuses to know: how grammars are compiled, slots.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.types.grammar import GrammarSpec, ThoughtSpec, TokenMasks, Vocabulary
from quire.types.seams import Grammar, GrammarBackend

OPENING, THINKING, GAP, ANSWERING = range(4)
SPACES = b" \n\r\t"
MAX_GAP = 2  # tokens of white space between a thought and its answer


def compile_answer(backend: GrammarBackend, spec: GrammarSpec, vocabulary: Vocabulary) -> Grammar:
    """A grammar for a whole answer, its thought included."""
    if spec.thought is None:
        return backend.compile(spec, vocabulary)
    inner = None if spec.kind == "free" else backend.compile(spec.answer, vocabulary)
    return ThoughtGrammar(inner, ThoughtMarks(spec.thought, vocabulary))


class ThoughtMarks:
    """The marks of a thought in a vocabulary."""

    def __init__(self, spec: ThoughtSpec, vocabulary: Vocabulary):
        self.spec = spec
        self.vocabulary = vocabulary
        self.open = spec.open.encode()
        self.closes = [close.encode() for close in spec.closes]
        self.close_tokens = _spelled(spec.closes[0], vocabulary)
        self.longest = max(map(len, self.closes))
        self._openings: dict[bytes, TokenMasks] = {}

    @cached_property
    def any_token(self) -> TokenMasks:
        return self._mask([i for i, token in enumerate(self.vocabulary.tokens) if token])

    @cached_property
    def ends(self) -> TokenMasks:
        return self._mask(self.vocabulary.ends)

    @cached_property
    def spaces(self) -> TokenMasks:
        return self._mask([i for i, token in enumerate(self.vocabulary.tokens) if token and not token.strip(SPACES)])

    @cached_property
    def crossing(self) -> dict[bytes, TokenMasks]:
        """By how much of a mark stands already: tokens that complete it and go on with an answer, whose grammar could
        not be asked."""
        found: dict[bytes, list[int]] = {}
        for close in self.closes:
            rests = [(close[:at], close[at:]) for at in range(len(close))]
            for i, token in enumerate(self.vocabulary.tokens):
                if close[-1:] not in token:
                    continue
                for stands, rest in rests:
                    at = token.find(rest) if not stands else 0
                    if at >= 0 and token.startswith(rest, at) and token[at + len(rest) :].strip(SPACES):
                        found.setdefault(stands, []).append(i)
        return {stands: self._mask(ids) for stands, ids in found.items()}

    def opening(self, begun: bytes) -> TokenMasks:
        """Tokens that go on with the mark that begins a thought."""
        if begun not in self._openings:
            rest, tokens = self.open[len(begun) :], enumerate(self.vocabulary.tokens)
            self._openings[begun] = self._mask(
                [i for i, t in tokens if t and (rest.startswith(t) or t.startswith(rest))]
            )
        return self._openings[begun]

    def _mask(self, ids: Sequence[int]) -> TokenMasks:
        bits = np.zeros(-(-len(self.vocabulary.tokens) // 8) * 8, np.uint8)
        bits[[i for i in ids if i < len(self.vocabulary.tokens)]] = 1
        return np.packbits(bits, bitorder="little")


def _spelled(text: str, vocabulary: Vocabulary) -> list[int]:
    """The tokens of a text in which special tokens are themselves."""
    special = {vocabulary.tokens[i].decode("utf-8", "replace"): i for i in vocabulary.special}
    found = [name for name in special if name and name in text]
    parts = re.split(f"({'|'.join(sorted(map(re.escape, found), key=len, reverse=True))})", text) if found else [text]
    tokens: list[int] = []
    for part in parts:
        tokens += [special[part]] if part in special else vocabulary.encode(part) if part else []
    return tokens


class _State(NamedTuple):
    phase: int
    tail: bytes = b""  # of the thought, or the beginning of the mark that opens it
    length: int = 0  # tokens of the thought, or of the gap
    forced: int = 0  # tokens of the forced end that are out
    pending: tuple[int, ...] = ()  # tokens of which it is open whether they begin a thought
    inner: int = 0  # tokens that the answer's grammar has accepted


class ThoughtGrammar:
    def __init__(self, inner: Grammar | None, marks: ThoughtMarks):
        self._inner = inner
        self._marks = marks
        self._states = [_State(THINKING if marks.spec.inside else OPENING)]

    @property
    def error(self) -> str:
        return self._inner.error if self._inner is not None else ""

    @property
    def done(self) -> bool:
        return self._inner is not None and self._states[-1].phase == ANSWERING and self._inner.done

    @property
    def _forcing(self) -> bool:
        state, budget = self._states[-1], self._marks.spec.budget
        return state.phase == THINKING and budget is not None and state.length >= budget

    def fill(self, row: npt.NDArray[np.uint8]) -> None:
        state, marks = self._states[-1], self._marks
        if self._forcing:
            token = marks.close_tokens[state.forced]
            row[:] = 0
            row[token // 8] = 1 << token % 8
        elif self._inner is None:
            row[:] = marks.any_token[: len(row)]
        elif state.phase == THINKING:
            mask = marks.any_token & ~marks.ends
            for stands, tokens in marks.crossing.items():
                if state.tail.endswith(stands):
                    mask &= ~tokens
            row[:] = mask[: len(row)]
        elif state.phase == OPENING:
            self._fill_after_pending(row)
            row[:] |= marks.opening(state.tail)[: len(row)]
        else:
            self._inner.fill(row)
            if state.phase == GAP and state.length < MAX_GAP:
                row[:] |= marks.spaces[: len(row)]

    def _fill_after_pending(self, row: npt.NDArray[np.uint8]) -> None:
        """What the answer's grammar allows if what came so far is its beginning."""
        assert self._inner is not None
        taken = 0
        for token in self._states[-1].pending:
            self._inner.fill(row)
            if not row[token // 8] >> token % 8 & 1:
                row[:] = 0
                break
            self._inner.accept([token])
            taken += 1
        else:
            self._inner.fill(row)
        if taken:
            self._inner.rollback(taken)

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._states.append(self._after(token, self._states[-1]))

    def _after(self, token: int, state: _State) -> _State:
        if state.phase == OPENING:
            return self._opened(token, state)
        if state.phase == THINKING:
            return self._thought(token, state)
        if state.phase == GAP and self._inner is not None:
            row = np.empty(-(-len(self._marks.vocabulary.tokens) // 8), np.uint8)
            self._inner.fill(row)
            if not row[token // 8] >> token % 8 & 1:
                return state._replace(length=state.length + 1)
        return self._answered(state, [token])

    def _opened(self, token: int, state: _State) -> _State:
        begun, mark = state.tail + self._marks.vocabulary.tokens[token], self._marks.open
        if self._inner is None:
            begun = begun.lstrip()  # a model that is free may write white space before it
        if begun.startswith(mark):
            return self._closed(begun[len(mark) :], _State(THINKING, length=1, inner=state.inner))
        pending = (*state.pending, token)
        if mark.startswith(begun):
            return state._replace(tail=begun, pending=pending)
        return self._answered(state, pending)

    def _thought(self, token: int, state: _State) -> _State:
        if self._forcing:
            state = state._replace(forced=state.forced + 1)
            return self._behind(state) if state.forced == len(self._marks.close_tokens) else state
        data = state.tail + self._marks.vocabulary.tokens[token]
        return self._closed(data, state._replace(length=state.length + 1))

    def _closed(self, data: bytes, state: _State) -> _State:
        """After more of a thought, which may be its end."""
        ends = [at + len(close) for close in self._marks.closes if (at := data.find(close)) >= 0]
        if not ends:
            return state._replace(tail=data[max(0, len(data) - self._marks.longest + 1) :])
        behind = self._behind(state)
        rest = data[min(ends) :].strip(SPACES)
        if rest and self._inner is not None:  # not drawn under a mask of this grammar: the answer has begun
            return self._answered(behind, self._marks.vocabulary.encode(rest.decode("utf-8", "replace")))
        return behind

    def _behind(self, state: _State) -> _State:
        return _State(GAP if self._marks.spec.gap and self._inner is not None else ANSWERING, inner=state.inner)

    def _answered(self, state: _State, tokens: Sequence[int]) -> _State:
        if self._inner is not None:
            self._inner.accept(tokens)
        return _State(ANSWERING, inner=state.inner + len(tokens))

    def forced(self) -> list[int]:
        if self._forcing:
            return self._marks.close_tokens[self._states[-1].forced :]
        answering = self._states[-1].phase == ANSWERING and self._inner is not None
        return self._inner.forced() if answering and self._inner is not None else []

    def rollback(self, count: int) -> None:
        inner = self._states[-1].inner
        del self._states[-count:]
        if self._inner is not None and inner > self._states[-1].inner:
            self._inner.rollback(inner - self._states[-1].inner)

    def fork(self) -> ThoughtGrammar:
        made = ThoughtGrammar(self._inner.fork() if self._inner is not None else None, self._marks)
        made._states = list(self._states)
        return made
