"""The output of a response: items that open, fill and close, and the events that tell of it in OpenAI's order.

Refuses to know: engines, requests, the response around the items.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from quire.serve.core.token_logprobs import ChatTokenLogprob
from quire.serve.core.turns import Reply
from quire.serve.http.http_io import json
from quire.serve.openai.responses_bodies import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
)
from quire.text.segments import CallBegun, Said, Segment, Thought


class Events:
    """Numbers events and writes them."""

    def __init__(self) -> None:
        self._number = 0

    def write(self, kind: str, **data: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), json(event))


class Output:
    """The items of one answer. Each call of `write` adds what is new and returns the events for it."""

    def __init__(self, events: Events, reply: Reply):
        self.items: list[OutputItem] = []
        self._events = events
        self._reply = reply
        self._parts: list[str] = []  # of the open item

    def write(self, segment: Segment, logprobs: Sequence[ChatTokenLogprob] = ()) -> bytes:
        if isinstance(segment, Said):
            return self._text(segment.text, logprobs)
        if isinstance(segment, Thought):
            return self._thought(segment.text)
        if isinstance(segment, CallBegun):
            call = self._reply.calls[segment.index]
            return self._open(OutputCall(id=_id("fc"), call_id=call.id, name=call.name))
        self._parts.append(segment.text)
        return self._event("response.function_call_arguments.delta", delta=segment.text)

    def close(self, status: str = "completed") -> bytes:
        """End the open item."""
        if not self.items or self.items[-1].status != "in_progress":
            return b""
        item, text = self.items[-1], "".join(self._parts)
        item.status = status
        if isinstance(item, OutputCall):
            item.arguments = text
            out = self._event("response.function_call_arguments.done", name=item.name, arguments=text)
        elif isinstance(item, OutputMessage):
            part = item.content[0]
            part.text = text
            out = self._event("response.output_text.done", content_index=0, text=text, logprobs=part.logprobs)
            out += self._event("response.content_part.done", content_index=0, part=part)
        else:
            item.content[0].text = text
            out = self._event("response.reasoning_text.done", content_index=0, text=text)
            out += self._event("response.content_part.done", content_index=0, part=item.content[0])
        return out + self._events.write("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _text(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> bytes:
        out = b""
        if not self.items or not isinstance(self.items[-1], OutputMessage):
            out = self._open(OutputMessage(id=_id("msg")))
            part = OutputText()
            out += self._event("response.content_part.added", content_index=0, part=part)
            self.items[-1].content = [part]  # type: ignore[union-attr]
        item = self.items[-1]
        assert isinstance(item, OutputMessage)
        item.content[0].logprobs = [*item.content[0].logprobs, *logprobs]
        self._parts.append(text)
        return out + self._event("response.output_text.delta", content_index=0, delta=text, logprobs=list(logprobs))

    def _thought(self, text: str) -> bytes:
        out = b""
        if not self.items or not isinstance(self.items[-1], OutputReasoning):
            out = self._open(OutputReasoning(id=_id("rs")))
            out += self._event("response.content_part.added", content_index=0, part=ReasoningText())
            self.items[-1].content = [ReasoningText()]  # type: ignore[union-attr]
        self._parts.append(text)
        return out + self._event("response.reasoning_text.delta", content_index=0, delta=text)

    def _open(self, item: OutputItem) -> bytes:
        closed = self.close()
        self.items.append(item)
        self._parts = []
        return closed + self._events.write("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _event(self, kind: str, **data: Any) -> bytes:
        return self._events.write(kind, item_id=self.items[-1].id, output_index=len(self.items) - 1, **data)


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
