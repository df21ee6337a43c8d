"""Stop strings in a stream of text: found wherever they fall across pieces, never let out in part.

The stop that is complete first wins; of several complete at the same character, the longest. What is held back
is exactly the longest end of the text that may still become a stop string. One pass per character through an
automaton (Aho-Corasick) keeps that true at any number and length of stops.

Refuses to know: tokens.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class _Automaton:
    """States are prefixes of stop strings; the state after a text is its longest end that is such a prefix."""

    def __init__(self, stops: Sequence[str]):
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.found: list[str | None] = [None]  # the longest stop that ends in this state
        for stop in stops:
            self._insert(stop)
        self.fallback = [0] * len(self.next)  # the longest proper end that is a state too
        self._link()
        # Most text has nothing to do with any stop: one search tells where it could begin to.
        self.first = re.compile("[" + "".join(re.escape(c) for c in self.next[0]) + "]")

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self.next[state]:
                self.next[state][character] = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = self.next[state][character]
        self.found[state] = stop

    def _link(self) -> None:
        """Breadth first: a state's fallback is less deep than the state, so it is known before it is needed."""
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            self.found[state] = self.found[state] or self.found[self.fallback[state]]
            for character, child in self.next[state].items():
                self.fallback[child] = self.step(self.fallback[state], character)
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        while state and character not in self.next[state]:
            state = self.fallback[state]
        return self.next[state].get(character, 0)


@lru_cache(maxsize=64)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)


class StopMatcher:
    """One stream of text against some stop strings. After a match nothing more comes out."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False):
        self._automaton = _automaton(tuple(stops)) if stops else None
        self._include = include_stop
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, early: bool = False) -> tuple[str, str | None]:
        """(text that is safe to emit now, the stop string that ended the text or None). `early`: it is too early for
        a stop, and what is complete with this text is passed over."""
        automaton = self._automaton
        if automaton is None:
            return text, None
        if self.matched is not None:
            return "", self.matched
        if self._state == 0:
            begin = automaton.first.search(text)
            if begin is None:
                return text, None
            at = begin.start()
        else:
            at = 0
        state, step, found = self._state, automaton.step, automaton.found
        for index in range(at, len(text)):
            state = step(state, text[index])
            if found[state] is not None and not early:
                return self._match(text[: index + 1], found[state] or "")
        whole = self._held + text
        out = len(whole) - automaton.depth[state]
        self._state, self._held = state, whole[out:]
        return whole[:out], None

    def flush(self) -> str:
        """What was held back, when the text ended otherwise."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _match(self, text: str, stop: str) -> tuple[str, str]:
        whole = self._held + text
        self.matched, self._held = stop, ""
        return (whole if self._include else whole[: len(whole) - len(stop)]), stop
