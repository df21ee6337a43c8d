"""Prompts with marked chunks as token ids: each chunk is tokenised by itself, so that it has the same tokens wherever
it stands. Refuses to know: what is done with chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.text_model import TextModel
from quire.text.tokenizer import Tokenizer
from quire.types.blend import MAX_CHUNKS, Blend, BlendLike, BlendParams
from quire.types.errors import InputError


def encode_chunks(tokenizer: Tokenizer, text: str, how: BlendParams, *, add_special: bool) -> tuple[list[int], Blend]:
    """Token ids of a text without its separators, and where the chunks between them are."""
    if how.chunks:
        raise InputError("chunks are positions of token ids; in a text they stand between separators", param="blend")
    if not how.separator:
        return tokenizer.encode(text, add_special=add_special), how.of([])
    head, *chunks = text.split(how.separator, MAX_CHUNKS + 2)
    if not chunks:
        raise InputError(f"the separator {how.separator!r} is nowhere in the prompt", param="blend")
    if len(chunks) > MAX_CHUNKS + 1:
        raise InputError(f"the separator marks more than {MAX_CHUNKS} chunks", param="blend")
    tokens, spans = tokenizer.encode(head, add_special=add_special), []
    for chunk in chunks[:-1]:
        ids = tokenizer.encode_on(chunk)
        if ids:
            spans.append((len(tokens), len(tokens) + len(ids)))
        tokens += ids
    return tokens + tokenizer.encode_on(chunks[-1]), how.of(spans)


def chat_prompt(
    text: TextModel,
    messages: Sequence[Mapping[str, Any]],
    how: BlendLike | None = None,
    /,
    *,
    prefix: str = "",
    **template: Any,  # of any name: that of a parameter above too
) -> tuple[list[int], Blend | None]:
    """A conversation as token ids, and where its chunks are, if it has any."""
    if how is None:
        return text.encode_chat(messages, prefix=prefix, **template), None
    rendered = text.render_chat(messages, **template) + prefix
    return encode_chunks(text.tokenizer, rendered, BlendParams.read(how), add_special=False)
