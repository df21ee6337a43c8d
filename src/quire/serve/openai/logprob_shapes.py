"""Log-probabilities in the two shapes OpenAI gave them, and the shape vLLM gave those of the prompt.

Refuses to know: where the numbers come from.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

from quire.serve.core.token_logprobs import FLOOR, TokenBytes, TokenLabels, token_logprobs
from quire.serve.openai.response_bodies import ChatLogprobs, CompletionLogprobs, PromptLogprob, PromptLogprobs
from quire.types.plan import TokenLogprobs


def chat_logprobs(tokenizer: TokenBytes, entries: Sequence[TokenLogprobs], as_ids: bool | None = False) -> ChatLogprobs:
    return ChatLogprobs(token_logprobs(tokenizer, entries, as_ids=as_ids))


class CompletionLogprobsBuilder:
    """Completion logprobs of one choice, piece by piece; remembers how many characters came before."""

    def __init__(self, tokenizer: TokenBytes, as_ids: bool | None = False):
        self._tokenizer = tokenizer
        self._label = TokenLabels(tokenizer, as_ids)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def echo(self, prompt: list[int], text: str) -> None:
        """The prompt comes first. Its tokens may say more than its text (a BOS, a leading space); that lies before
        the text begins."""
        said = b"".join(map(self._tokenizer.token_bytes, prompt)).decode("utf-8", "replace")
        self._offset = len(text) - len(said)

    def add(self, entries: Sequence[TokenLogprobs | int]) -> CompletionLogprobs:
        """The shape for the next tokens. A bare id stands for a token that nothing predicted."""
        out = CompletionLogprobs([], [], [], [])
        for entry in entries:
            token = entry if isinstance(entry, int) else entry.token
            raw = self._tokenizer.token_bytes(token)
            out.tokens.append(self._label(token))
            out.text_offset.append(max(self._offset, 0))
            self._offset += len(self._characters.decode(raw))
            if isinstance(entry, int):
                out.token_logprobs.append(None)
                out.top_logprobs.append(None)
            else:
                out.token_logprobs.append(max(entry.logprob, FLOOR))
                out.top_logprobs.append(dict(self._alternatives(entry)))
        return out

    def _alternatives(self, entry: TokenLogprobs) -> Iterator[tuple[str, float]]:
        for token, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            yield self._label(token), max(logprob, FLOOR)
        yield self._label(entry.token), max(entry.logprob, FLOOR)


def scored_prompt(prompt: list[int], entries: Sequence[TokenLogprobs]) -> list[TokenLogprobs | int]:
    """One item per prompt token: its logprobs, or the bare id where nothing predicts it (the first)."""
    return [*prompt[: len(prompt) - len(entries)], *entries]


def prompt_logprobs(tokenizer: TokenBytes, scored: Sequence[TokenLogprobs | int]) -> PromptLogprobs:
    out: PromptLogprobs = []
    label = TokenLabels(tokenizer)
    for item in scored:
        if isinstance(item, int):
            out.append(None)
            continue
        position = {
            token: PromptLogprob(max(logprob, FLOOR), rank, label(token))
            for rank, (token, logprob) in enumerate(zip(item.top_ids, item.top_logprobs, strict=True), 1)
        }
        position[item.token] = PromptLogprob(max(item.logprob, FLOOR), item.rank, label(item.token))
        out.append(position)
    return out
