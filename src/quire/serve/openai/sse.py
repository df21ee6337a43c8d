"""Stream events from prefabricated bytes: what is the same in every event of a stream is encoded once.

Refuses to know: sockets, engines.
"""

from __future__ import annotations

import time

from quire.serve.core.generation import Serving
from quire.serve.http.http_io import json
from quire.serve.openai.request_bodies import StreamOptions
from quire.serve.openai.response_bodies import Usage
from quire.types.outputs import Delta


class Chunks:
    """Writes the events of one stream; an API family passes the choice, ready-made."""

    def __init__(self, serving: Serving, id: str, object: str, options: StreamOptions | None):
        head = {
            "id": id,
            "object": object,
            "created": int(time.time()),
            "model": serving.frontend.model_name,
            "system_fingerprint": serving.fingerprint,
        }
        self.with_usage = options is not None and options.include_usage
        self._head = b"data: " + json(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self.with_usage else b"]}\n\n"

    def event(self, choice: bytes) -> bytes:
        return self._head + choice + self._tail

    def around(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """What stands before and after the one thing that changes within a choice."""
        return self._head + before, after + self._tail

    def usage(self, usage: Usage) -> bytes:
        """The last event, if asked for: no choices, the whole request's usage."""
        return self._head + b'],"usage":' + json(usage) + b"}\n\n"


def worth_sending(delta: Delta) -> bool:
    """Tokens whose text is held back (half a character, a possible stop string) have nothing to say yet."""
    return bool(delta.text or delta.logprobs or delta.finish_reason)
