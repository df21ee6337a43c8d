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


class TokenLabels:
    """How tokens are named: by their text, or, `as_ids`, as vLLM's `token_id:N`, which tells all of them apart."""

    def __init__(self, tokenizer: TokenBytes, as_ids: bool | None = False):
        self.token_bytes = tokenizer.token_bytes
        self._as_ids = as_ids

    def __call__(self, token: int) -> str:
        """A token that is no whole character reads `bytes:\\xe2\\x82`, as OpenAI writes it."""
        if self._as_ids:
            return f"token_id:{token}"
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def token_logprobs(
    tokenizer: TokenBytes, entries: Sequence[TokenLogprobs], *, as_ids: bool | None = False
) -> list[ChatTokenLogprob]:
    label, content = TokenLabels(tokenizer, as_ids), []
    for entry in entries:
        tops = [
            TopLogprob(label(token), max(logprob, FLOOR), list(tokenizer.token_bytes(token)))
            for token, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        raw = list(tokenizer.token_bytes(entry.token))
        content.append(ChatTokenLogprob(label(entry.token), max(entry.logprob, FLOOR), raw, tops))
    return content
