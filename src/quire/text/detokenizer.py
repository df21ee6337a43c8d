"""Token ids to text as they come, never half a character.

    push([228, 189]) → ""     two of the three bytes of 你
    push([160])      → "你"

All pushed text plus the flush equals decoding everything at once, after the prompt. Refuses to know: requests,
stop strings.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence

from quire.text.tokenizer import Tokenizer, strip_leading

_LONGEST_CHARACTER = 4  # bytes
_CONTEXT = 6  # prompt tokens that may matter to the text of the next one


class IncrementalDetokenizer:
    """One stream. The prompt is what the tokens continue: it says whether a leading space is dropped, and a
    character that it left unfinished is finished by the stream."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True):
        table = tokenizer.table(skip_special_tokens)
        stream: _ByteStream | _WindowStream
        if table is None:
            stream = _WindowStream(tokenizer, prompt_ids, skip_special_tokens)
        else:
            stream = _ByteStream(table, tokenizer.leading, prompt_ids)
        # Attributes rather than methods: a token passes here, and a call more is a tenth of what its text costs.
        self.push: Callable[[Sequence[int]], str] = stream.push  # text that is complete with these tokens
        self.flush: Callable[[], str] = stream.flush  # the rest: a character that never became whole is U+FFFD


class _ByteStream:
    """Where each token has its bytes: a join and an incremental UTF-8 reading, one call of C each."""

    def __init__(self, table: list[bytes], leading: int, prompt: Sequence[int]):
        self._table = table
        self._pending = self._unfinished(prompt)
        began = leading == 0 or any(self._piece(token) for token in prompt)
        self._leading = 0 if began else leading

    def push(self, ids: Sequence[int]) -> str:
        try:
            data = self._table[ids[0]] if len(ids) == 1 else b"".join([self._table[i] for i in ids])
        except IndexError:  # a padded vocabulary: the model may know ids that have no text
            data = b"".join(map(self._piece, ids))
        if self._pending:
            data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return self._begin(text) if self._leading and text else text

    def flush(self) -> str:
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return self._begin(text) if self._leading else text

    def _begin(self, text: str) -> str:
        leading, self._leading = self._leading, 0
        return strip_leading(text, leading)

    def _piece(self, token: int) -> bytes:
        return self._table[token] if token < len(self._table) else b""

    def _unfinished(self, prompt: Sequence[int]) -> bytes:
        """The bytes of a character begun at the end of the prompt; only its last few bytes can tell."""
        tail = b""
        for token in reversed(prompt):
            tail = self._piece(token) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        _, used = utf_8_decode(tail, "replace", False)
        return tail[used:]


class _WindowStream:
    """Where the text of a token depends on its neighbours: decode a short window with and without the new tokens
    and emit the difference, once it does not end inside a character."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool):
        self._decode = tokenizer.decode
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._ids = self._spoken(prompt)[-_CONTEXT:]
        self._emitted = len(self._ids)  # tokens of the window whose text is out

    def push(self, ids: Sequence[int]) -> str:
        self._ids += self._spoken(ids)
        return self._advance(final=False)

    def flush(self) -> str:
        return self._advance(final=True)

    def _spoken(self, ids: Sequence[int]) -> list[int]:
        """Tokens that say something; the others would only fill the window."""
        return [i for i in ids if i not in self._skipped]

    def _advance(self, final: bool) -> str:
        before = self._decode(self._ids[: self._emitted], False)
        after = self._decode(self._ids, False)
        if len(after) <= len(before) or (after.endswith("\ufffd") and not final):
            return ""
        self._ids = self._ids[self._emitted :]
        self._emitted = len(self._ids)
        return after[len(before) :]
