"""POST /tokenize and /detokenize, in the shape vLLM gave them. Refuses to know: the engine."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.fields import MAX_TOOLS, Int, Name, extension
from quire.serve.core.generation import Serving, off_loop
from quire.serve.core.turns import Turn, render
from quire.serve.http.http_io import decode, json, read_body
from quire.serve.http.openapi import answers
from quire.serve.openai.chat_parts import FunctionTool, Message
from quire.types.errors import InputError
from quire.types.sampling_params import SamplingParams

COUNTED = 1 << 20  # tokens of a text that may be counted, however short the model's context


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /tokenize: a `prompt`, or `messages` of a chat."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool = True
    continues: Annotated[bool, extension("the prompt goes on from another text")] = False
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /detokenize."""

    tokens: list[Int]
    model: Name | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(serving: Serving, raw: bytes) -> TokenizeResponse:
    body = decode(_TOKENIZE, raw)
    await serving.use_model(body.model, engine=False)
    if (body.prompt is None) == (body.messages is None):
        raise InputError("send either prompt or messages", param="prompt")
    info = serving.frontend.client.info
    tokenizer = serving.frontend.text.tokenizer.up_to(max(COUNTED, info.max_model_len))
    if body.messages is None:
        prompt = body.prompt or ""

        def encode() -> list[int]:
            if body.continues:
                return tokenizer.encode_on(prompt)
            return tokenizer.encode(prompt, add_special=body.add_special_tokens)

        tokens = await off_loop(len(prompt), encode)
    else:
        turn = Turn(
            messages=[message.plain() for message in body.messages],
            params=SamplingParams(),
            tools=[tool.function.tool() for tool in body.tools or ()],
            variables=body.chat_template_kwargs or {},
            begin=body.add_generation_prompt,
        )
        tokens, _ = await render(serving, turn)
    answer = TokenizeResponse(len(tokens), info.max_model_len, tokens)
    if body.return_token_strs:

        def spell() -> list[str]:
            return [tokenizer.token_text(token) for token in tokens]  # as the vocabulary has them

        answer.token_strs = await off_loop(len(tokens), spell)
    return answer


async def detokenize(serving: Serving, raw: bytes) -> DetokenizeResponse:
    body = decode(_DETOKENIZE, raw)
    await serving.use_model(body.model, engine=False)
    size = serving.frontend.client.info.vocab_size

    def work() -> str:
        if (stranger := next((token for token in body.tokens if not 0 <= token < size), None)) is not None:
            raise InputError(f"token id {stranger} is outside the vocabulary of {size}", param="tokens")
        return serving.frontend.text.tokenizer.decode(body.tokens, False)

    return DetokenizeResponse(await off_loop(len(body.tokens), work))


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["tokens"])

    @routes.post(
        "/tokenize", summary="Text to token ids", openapi_extra=answers(TokenizeResponse, takes=TokenizeRequest)
    )
    async def tokenize_route(request: Request) -> Response:
        answer = await tokenize(serving, await read_body(request, serving.max_body))
        return Response(json(answer), media_type="application/json")

    @routes.post(
        "/detokenize", summary="Token ids to text", openapi_extra=answers(DetokenizeResponse, takes=DetokenizeRequest)
    )
    async def detokenize_route(request: Request) -> Response:
        answer = await detokenize(serving, await read_body(request, serving.max_body))
        return Response(json(answer), media_type="application/json")

    return routes
