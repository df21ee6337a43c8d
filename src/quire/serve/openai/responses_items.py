"""The output of a response: items that open, fill and close, and the events that tell of it in OpenAI's order.

Refuses to know: engines, requests, the response around the items.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from quire.serve.core.token_logprobs import ChatTokenLogprob
from quire.serve.http.http_io import json
from quire.serve.openai.carried_thoughts import carried
from quire.serve.openai.responses_objects import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTextCall,
    ReasoningText,
    ResponseObject,
    SummaryText,
)
from quire.text.text_inputs import TextInput


class Events:
    """Numbers events and writes them."""

    def __init__(self) -> None:
        self._number = 0

    def write(self, kind: str, **data: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), json(event))


class Output:
    """The items of one answer. Each call adds what is new and returns the events for it.

    `texts`: names of the tools that take plain text. `summarised`: thoughts are shown as summaries too. `carried`:
    also as what their caller is to send back."""

    def __init__(
        self,
        events: Events,
        *,
        texts: Collection[str] = (),
        summarised: bool = False,
        carried: bool = False,
        new_id: Callable[[str], str] | None = None,
    ):
        self.items: list[OutputItem] = []
        self._events = events
        self._texts = texts
        self._summarised = summarised
        self._carried = carried
        self._new_id = new_id or item_id
        self._parts: list[str] = []  # of the open item
        self._input = TextInput()  # of the open call, if it is of text

    def call(self, call_id: str, name: str) -> bytes:
        """A call begins."""
        if name in self._texts:
            self._input = TextInput()
            return self._open(OutputTextCall(id=self._new_id("ctc"), call_id=call_id, name=name))
        return self._open(OutputCall(id=self._new_id("fc"), call_id=call_id, name=name))

    def arguments(self, text: str) -> bytes:
        """... and goes on."""
        if isinstance(self.items[-1], OutputTextCall):
            text = self._input.push(text)
            if not text:
                return b""
            self._parts.append(text)
            return self._event("response.custom_tool_call_input.delta", delta=text)
        self._parts.append(text)
        return self._event("response.function_call_arguments.delta", delta=text)

    def text(self, text: str, logprobs: Sequence[ChatTokenLogprob] = ()) -> bytes:
        out = b""
        if not self.items or not isinstance(self.items[-1], OutputMessage):
            out = self._open(OutputMessage(id=self._new_id("msg")))
            part = OutputText()
            out += self._event("response.content_part.added", content_index=0, part=part)
            self.items[-1].content = [part]  # type: ignore[union-attr]
        item = self.items[-1]
        assert isinstance(item, OutputMessage)
        item.content[0].logprobs = [*item.content[0].logprobs, *logprobs]
        self._parts.append(text)
        return out + self._event("response.output_text.delta", content_index=0, delta=text, logprobs=list(logprobs))

    def thought(self, text: str) -> bytes:
        out = b""
        if not self.items or not isinstance(self.items[-1], OutputReasoning):
            out = self._open(OutputReasoning(id=self._new_id("rs")))
            out += self._event("response.content_part.added", content_index=0, part=ReasoningText())
            self.items[-1].content = [ReasoningText()]  # type: ignore[union-attr]
            if self._summarised:
                out += self._event("response.reasoning_summary_part.added", summary_index=0, part=SummaryText())
        self._parts.append(text)
        if self._summarised:
            out += self._event("response.reasoning_summary_text.delta", summary_index=0, delta=text)
        return out + self._event("response.reasoning_text.delta", content_index=0, delta=text)

    def close(self, status: str = "completed") -> bytes:
        """End the open item."""
        if not self.items or self.items[-1].status != "in_progress":
            return b""
        item, text = self.items[-1], "".join(self._parts)
        item.status = status
        if isinstance(item, OutputCall):
            item.arguments = text
            out = self._event("response.function_call_arguments.done", name=item.name, arguments=text)
        elif isinstance(item, OutputTextCall):
            item.input = text
            out = self._event("response.custom_tool_call_input.done", input=text)
        elif isinstance(item, OutputMessage):
            part = item.content[0]
            part.text = text
            out = self._event("response.output_text.done", content_index=0, text=text, logprobs=part.logprobs)
            out += self._event("response.content_part.done", content_index=0, part=part)
        else:
            out = self._close_thought(item, text)
        return out + self._events.write("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _close_thought(self, item: OutputReasoning, text: str) -> bytes:
        item.content[0].text = text
        out = self._event("response.reasoning_text.done", content_index=0, text=text)
        out += self._event("response.content_part.done", content_index=0, part=item.content[0])
        if self._summarised:
            item.summary = [SummaryText(text=text)]
            out += self._event("response.reasoning_summary_text.done", summary_index=0, text=text)
            out += self._event("response.reasoning_summary_part.done", summary_index=0, part=item.summary[0])
        if self._carried:
            item.encrypted_content = carried(text)
        return out

    def _open(self, item: OutputItem) -> bytes:
        closed = self.close()
        self.items.append(item)
        self._parts = []
        return closed + self._events.write("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _event(self, kind: str, **data: Any) -> bytes:
        return self._events.write(kind, item_id=self.items[-1].id, output_index=len(self.items) - 1, **data)


def item_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def replayed(response: ResponseObject) -> list[bytes]:
    """The events of a response that is over, each item in one piece."""
    events, items = Events(), response.output
    begun = msgspec.structs.replace(response, status="in_progress", output=[], usage=None, completed_at=None)
    ids = iter([item.id for item in items])
    thoughts = [item for item in items if isinstance(item, OutputReasoning)]
    texts = {item.name for item in items if isinstance(item, OutputTextCall)}
    output = Output(events, texts=texts, summarised=any(t.summary for t in thoughts), new_id=lambda _: next(ids))
    out = events.write("response.created", response=begun) + events.write("response.in_progress", response=begun)
    for item in items:
        if isinstance(item, OutputMessage):
            out += output.text(item.content[0].text, item.content[0].logprobs)
        elif isinstance(item, OutputReasoning):
            out += output.thought(item.content[0].text)
        else:
            out += output.call(item.call_id, item.name)
            out += output.arguments(
                item.arguments if isinstance(item, OutputCall) else json({"input": item.input}).decode()
            )
        out += output.close(item.status)
    return split(out + events.write(f"response.{response.status}", response=response))


def split(events: bytes) -> list[bytes]:
    """Written events, one by one."""
    return [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
