"""A tokenizer as a grammar sees it: the bytes of every token, and the tokens of a text that goes on from another.

Knows: tokens. Refuses to know: grammars.
"""

from __future__ import annotations

from quire.text.tokenizer import Tokenizer
from quire.types.grammar import Vocabulary


def vocabulary_of(tokenizer: Tokenizer, size: int | None = None) -> Vocabulary:
    """`size`: ids the model knows, if more than the tokenizer has; those beyond stand for nothing."""
    count = tokenizer.vocab_size
    padding = max(0, (size or count) - count)
    return Vocabulary(
        tokens=[*map(tokenizer.token_bytes, range(count)), *[b""] * padding],
        special=tokenizer.special_ids,
        ends=sorted(tokenizer.eos_ids),
        encode=lambda text: tokenizer.encode_on(text, parse_special=False),
    )


def alphabet_of(tokenizer: Tokenizer) -> Vocabulary:
    """Single bytes beside the tokenizer's own special tokens: a vocabulary that is made in no time, and enough to tell
    whether a grammar makes sense."""
    free = [i for i in range(256 + len(tokenizer.special_ids)) if i not in tokenizer.special_ids][:256]
    tokens = [b""] * max(tokenizer.vocab_size, free[-1] + 1)
    for i in tokenizer.special_ids:
        tokens[i] = tokenizer.token_bytes(i)
    for byte, i in enumerate(free):
        tokens[i] = bytes([byte])
    return Vocabulary(
        tokens=tokens,
        special=tokenizer.special_ids,
        ends=sorted(tokenizer.eos_ids),
        encode=lambda text: [free[byte] for byte in text.encode()],
    )
