"""Conversations that come back: a list of messages that begins like one seen before goes on from its exact tokens.

Callers of chat APIs send the whole conversation each time. Found here, what the model said is not tokenised again, and
its pages are hit as long as the cache keeps them. Refuses to know: engines, frameworks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from quire.lang.model import Model
from quire.lang.pieces import Gen, Turn
from quire.lang.prompt import Forks, Prompt

Key = tuple[tuple[str, str], ...]
KEEP = 256


class Conversations:
    """The `keep` most recently used conversations over a model. Threads may share it."""

    def __init__(self, model: Model, keep: int = KEEP):
        self._model = model
        self._keep = keep
        self._known: OrderedDict[Key, Prompt] = OrderedDict()
        self._lock = threading.Lock()

    def answer(self, messages: Sequence[Mapping[str, str]], hole: Gen, n: int = 1) -> Forks:
        """`n` ways on from a conversation, as branches of one request, each waited for."""
        key = tuple((message["role"], message["content"]) for message in messages)
        prompt, rest = self._longest(key)
        for role, content in rest:
            prompt += Turn(role, (content,))
        branches = prompt.fork(n) + hole
        for branch in branches:
            self._remember((*key, ("assistant", branch.text)), branch)
        return branches

    def _longest(self, key: Key) -> tuple[Prompt, Key]:
        with self._lock:
            for size in range(len(key), 0, -1):
                found = self._known.get(key[:size])
                if found is not None:
                    self._known.move_to_end(key[:size])
                    return found, key[size:]
        return self._model.prompt, key

    def _remember(self, key: Key, prompt: Prompt) -> None:
        with self._lock:
            self._known[key] = prompt
            self._known.move_to_end(key)
            while len(self._known) > self._keep:
                self._known.popitem(last=False)
