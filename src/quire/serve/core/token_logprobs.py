"""Log-probabilities of tokens, token by token, in the shape that OpenAI gave them and others took over.

Refuses to know: where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from quire.types.plan import TokenLogprobs

FLOOR = -9999.0  # JSON has no infinity; OpenAI writes impossible tokens so


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class TokenBytes(Protocol):
    def token_bytes(self, token: int) -> bytes: ...


def label(raw: bytes) -> str:
    """A token's text; one that is no whole character reads `bytes:\\xe2\\x82`, as OpenAI writes it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def token_logprobs(tokenizer: TokenBytes, entries: Sequence[TokenLogprobs]) -> list[ChatTokenLogprob]:
    content = []
    for entry in entries:
        tops = [
            TopLogprob(label(raw := tokenizer.token_bytes(token)), max(logprob, FLOOR), list(raw))
            for token, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        raw = tokenizer.token_bytes(entry.token)
        content.append(ChatTokenLogprob(label(raw), max(entry.logprob, FLOOR), list(raw), tops))
    return content
