"""Stream events from prefabricated bytes: what is the same in every event of a stream is encoded once.

Refuses to know: sockets, engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.serve.core.generation import Serving
from quire.serve.http.http_io import json
from quire.serve.openai.request_bodies import StreamOptions
from quire.serve.openai.response_bodies import Usage
from quire.types.outputs import Delta


class Chunks:
    """Writes the events of one stream; an API family passes the choice, ready-made. `usage` tells what was used so
    far."""

    def __init__(
        self, serving: Serving, id: str, object: str, options: StreamOptions | None, usage: Callable[[], Usage]
    ):
        head = {
            "id": id,
            "object": object,
            "created": int(time.time()),
            "model": serving.model_name,
            "system_fingerprint": serving.fingerprint,
        }
        self.with_usage = options is not None and options.include_usage
        self.continuous = options is not None and options.continuous_usage_stats
        self._usage = usage
        self._head = b"data: " + json(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self.with_usage else b"]}\n\n"

    def event(self, choice: bytes, more: bytes = b"") -> bytes:
        """`more`: fields beside the choices, each with a comma before it."""
        if self.continuous:
            return b'%b%b],"usage":%b%b}\n\n' % (self._head, choice, json(self._usage()), more)
        tail = self._tail if not more else self._tail[:-3] + more + b"}\n\n"
        return self._head + choice + tail

    def around(self, before: bytes, after: bytes) -> tuple[bytes, bytes] | None:
        """What stands before and after the one thing that changes within a choice, unless something else does too."""
        return None if self.continuous else (self._head + before, after + self._tail)

    def last(self) -> bytes:
        """The last event, if asked for: no choices, the whole request's usage."""
        return self._head + b'],"usage":' + json(self._usage()) + b"}\n\n" if self.with_usage else b""


def worth_sending(delta: Delta) -> bool:
    """Tokens whose text is held back (half a character, a possible stop string) have nothing to say yet."""
    return bool(delta.text or delta.logprobs or delta.finish_reason)
