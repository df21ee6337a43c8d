"""Servers that fill the holes, over HTTP: Quire's own, by token ids, and any that speaks OpenAI's API, by text.

A Quire server gets the tokens a prompt already has, so that going on and forking find their pages there, as they do in
process. Of another server only the plain subset is asked: text, chat, sampling, and JSON schemas in chats. Refuses to
know: holes, engines, torch.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from quire.lang.backend import Answer, spell_apart
from quire.lang.state import State, Usage, settle
from quire.types import errors
from quire.types.errors import InputError, QuireError
from quire.types.grammar import GrammarSpec
from quire.types.outputs import Delta
from quire.types.request import FinishReason
from quire.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    import httpx

TIMEOUT = 600.0  # seconds for one answer
CONNECTIONS = 256
RETRIES = 4  # when a server says it is busy
LONGEST_PAUSE = 10.0
PLAIN = {"n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop"}
GRAMMAR_FIELD = {"json_schema": "json", "regex": "regex", "choice": "choice", "lark": "grammar", "gbnf": "grammar"}
ERRORS: dict[int, type[QuireError]] = {
    401: errors.UnauthorizedError,
    403: errors.ForbiddenError,
    408: errors.DeadlineError,
    429: errors.RateLimitError,
    503: errors.OverloadedError,
}


@asynccontextmanager
async def connected(url: str, *, model: str | None = None, api_key: str | None = None) -> AsyncIterator[Server]:
    """A server by its address. Which kind it is, it says itself in its list of models."""
    try:
        import httpx
    except ImportError as error:
        raise errors.ConfigError("a Model on a server needs httpx; pip install 'quire[lang]'") from error

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
    base = url.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=TIMEOUT, limits=limits) as http:
        server = Server(http, "")
        cards = (await server.call("GET", "/v1/models"))["data"]
        card = next((card for card in cards if model in (None, card["id"])), None)
        if card is None:
            known = ", ".join(card["id"] for card in cards) or "none"
            raise errors.ModelNotFoundError(f"{url} serves no model {model!r}; it has: {known}")
        yield (Server if card.get("owned_by") == "quire" else PlainServer)(http, card["id"])


class Server:
    """A Quire server: token ids in and out, every grammar, every parameter."""

    def __init__(self, http: httpx.AsyncClient, model: str):
        self._http = http
        self._model = model

    async def settle(self, state: State) -> State:
        return await settle(state, self)

    async def render(self, messages: list[dict[str, str]], generation: bool) -> str:
        body = {"messages": messages, "add_generation_prompt": generation}
        tokens = (await self.call("POST", "/tokenize", body))["tokens"]
        return (await self.call("POST", "/detokenize", {"tokens": tokens}))["prompt"]

    async def encode(self, text: str, *, first: bool, special: bool) -> list[int]:
        body = {"prompt": text, "add_special_tokens": special, "continues": not first}
        return (await self.call("POST", "/tokenize", body))["tokens"]

    async def generate(self, state: State, params: SamplingParams) -> list[Answer]:
        path, body = self._body(state, params)
        reply = await self.call("POST", path, body)
        usage = reply.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        cached, blended = details.get("cached_tokens") or 0, details.get("blended_tokens") or 0
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        drawn = usage.get("completion_tokens", 0)
        prompt = Usage(1, usage.get("prompt_tokens", 0), cached, blended_tokens=blended)
        shares = [Usage(output_tokens=_share(drawn, len(choices), index)) for index in range(len(choices))]
        shares[0] += prompt
        return [self._answer(choice, share) for choice, share in zip(choices, shares, strict=True)]

    async def spell(self, state: State, options: Sequence[str]) -> list[Answer]:
        return await spell_apart(self, state, options)

    async def stream(self, state: State, params: SamplingParams) -> AsyncGenerator[list[Delta], None]:
        path, body = self._body(state, params)
        async with self._http.stream("POST", path, json={**body, "stream": True}) as reply:
            if reply.is_error:
                await reply.aread()
                raise _error(reply)
            async for line in reply.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield [self._delta(choice) for choice in _checked(json.loads(line[6:]))["choices"]]

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One call and its answer; a server that is busy is asked again, when it said."""
        import httpx

        for attempt in range(RETRIES + 1):
            try:
                reply = await self._http.request(method, path, json=body)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
                raise errors.EngineDeadError(f"{self._http.base_url} does not answer: {reason}") from error
            if reply.status_code not in (429, 503) or attempt == RETRIES:
                break
            pause = reply.headers.get("retry-after", "")
            await asyncio.sleep(min(LONGEST_PAUSE, float(pause) if pause.isdigit() else 2.0**attempt / 4))
        if reply.is_error:
            raise _error(reply)
        return reply.json()

    def _body(self, state: State, params: SamplingParams) -> tuple[str, dict[str, Any]]:
        body = {"model": self._model, "max_tokens": params.max_tokens, **msgspec.to_builtins(params)}
        grammar = body.pop("grammar", None)
        if params.grammar is not None:
            assert grammar is not None
            body["structured_outputs"] = _structured(params.grammar)
        if state.session is not None:
            body["session_id"], body["session_ttl"] = state.session
        if state.tokens:
            body["prompt"] = state.tokens
        if state.chunks:
            body["blend"] = {"chunks": state.chunks}
        return "/v1/completions", {**body, "return_token_ids": True}

    def _answer(self, choice: dict[str, Any], usage: Usage) -> Answer:
        text, covered = choice["text"], choice["covered"]
        return Answer(
            text=text,
            tokens=tuple(choice["token_ids"][: covered["tokens"]]),
            covered=text[: covered["characters"]],
            finish=FinishReason(choice["finish_reason"]),
            logprobs=tuple((choice.get("logprobs") or {}).get("token_logprobs", ())),
            usage=usage,
        )

    def _delta(self, choice: dict[str, Any]) -> Delta:
        finish = choice.get("finish_reason")
        return Delta(
            branch=choice["index"],
            text=choice["text"],
            token_ids=choice["token_ids"],
            finish_reason=FinishReason(finish) if finish else None,
        )


class PlainServer(Server):
    """Another's server: text in and out, each call by itself. What it may not know is refused rather than dropped."""

    async def settle(self, state: State) -> State:
        return state

    def _body(self, state: State, params: SamplingParams) -> tuple[str, dict[str, Any]]:
        given = msgspec.to_builtins(params)
        given.pop("grammar", None)
        given.pop("max_tokens", None)
        if strangers := sorted(given.keys() - PLAIN):
            raise InputError(f"OpenAI's API has no {', '.join(strangers)}; use a Quire server", param=strangers[0])
        if state.session is not None:
            raise InputError("OpenAI's API has no sessions; use a Quire server", param="session_id")
        body = {"model": self._model, "max_tokens": params.max_tokens, **given}
        said = state.transcript
        if not said.chat:
            _refuse(params.grammar)
            return "/v1/completions", {**body, "prompt": said.text}
        if said.turns[-1] != ("assistant", ""):
            raise InputError("OpenAI's API begins answers itself: a hole must be all there is of the assistant's turn")
        if params.grammar is not None and params.grammar.kind == "json_schema":
            schema = {"name": "answer", "schema": json.loads(params.grammar.source), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        else:
            _refuse(params.grammar)
        return "/v1/chat/completions", {**body, "messages": said.messages[:-1]}

    def _answer(self, choice: dict[str, Any], usage: Usage) -> Answer:
        text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
        finish = FinishReason.LENGTH if choice["finish_reason"] == "length" else FinishReason.STOP
        return Answer(text=text, tokens=(), covered="", finish=finish, logprobs=(), usage=usage)

    def _delta(self, choice: dict[str, Any]) -> Delta:
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        finish = choice.get("finish_reason")
        return Delta(
            branch=choice["index"],
            text=text,
            token_ids=[0] if text else [],  # it does not say which; most servers send one at a time
            finish_reason=(FinishReason.LENGTH if finish == "length" else FinishReason.STOP) if finish else None,
        )


def _structured(grammar: GrammarSpec) -> dict[str, Any]:
    if grammar.kind == "json_object":
        return {"json_object": True}
    parsed = json.loads(grammar.source) if grammar.kind in ("json_schema", "choice") else grammar.source
    opened = {"disable_additional_properties": False} if grammar.kind == "json_schema" else {}  # as it is here
    return {GRAMMAR_FIELD[grammar.kind]: parsed, **opened}


def _refuse(grammar: GrammarSpec | None) -> None:
    if grammar is not None:
        raise InputError(
            f"this server is not known to hold answers to a {grammar.kind} grammar; use a Quire server, or leave the "
            "constraint out",
            param="where",
        )


def _share(total: int, parts: int, index: int) -> int:
    """The server says what all choices cost together; each is reckoned its share."""
    return total // parts + (index < total % parts)


def _error(reply: httpx.Response) -> QuireError:
    try:
        message = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"{reply.url} answered {reply.status_code}: {reply.text[:200]}"
    kind = ERRORS.get(reply.status_code, InputError if reply.status_code < 500 else QuireError)
    return kind(message)


def _checked(event: Any) -> Any:
    """A stream may end in an error."""
    if "error" in event:
        raise QuireError(event["error"].get("message", "the server ended the stream with an error"))
    return event
