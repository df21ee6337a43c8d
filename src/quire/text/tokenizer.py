"""Text to token ids and back.

`Tokenizer` wraps one tokenizer of the tokenizers library together with what the model's files say about special
tokens. It is made by `load_tokenizer` from a tokenizer.json (`from_files`) or from GGUF metadata (`from_gguf`).

Knows: tokens. Refuses to know: requests, chats, models' weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import tokenizers

from quire.text.token_bytes import pieces_of
from quire.types.errors import ContextLengthError, InputError, ModelFileError, QuireError

# Tokens that end a turn or a text, by the names model families give them. They count only if the model marks
# them as special.
END_NAMES = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<eos>",
        "</s>",
    }
)


_MARK = "\x02"  # stands for what came before; no tokenizer joins it with text
LONG = 2048  # characters; the library lets other threads run only while it encodes a batch
PART = 1 << 16  # characters of a text that are always tokenised together


class Tokenizer:
    """One model's tokenizer. Threads may share it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        tokens: list[str],
        *,
        named: Mapping[str, str] | None = None,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        note: str = "",
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._tokens = tokens
        self.named = dict(named or {})  # bos_token, eos_token, ... as chat templates want them
        self.note = note  # something a user should know about how this tokenizer came to be
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        by_name = (i for i in self.special_ids if i < len(tokens) and tokens[i] in END_NAMES)
        self.eos_ids = frozenset([*eos_ids, *by_name])
        self.bos_id = bos_id
        self._most: int | None = None
        self._pieces = pieces_of(backend.decoder, tokens)

    def up_to(self, most: int) -> Tokenizer:
        """The same, but that it refuses texts of far more than so many tokens, without tokenising all of them to find
        that out: a token takes some three hundred bytes on the way."""
        made = copy.copy(self)
        made._most = most
        return made

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text. `add_special`: with what the model wants around it (BOS, usually); `parse_special`:
        special tokens written in the text become themselves, otherwise they are spelled out."""
        backend = self._backend if parse_special else self._literal
        try:
            if self._most is not None:
                self._weigh(text, self._most)
            if len(text) > LONG:
                return list(backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)
            return list(backend.encode(text, add_special_tokens=add_special).ids)
        except (TypeError, UnicodeEncodeError) as error:
            raise InputError("the text has a lone surrogate, which is no character; send valid Unicode") from error

    def encode_pair(self, text: str, other: str | None, most: int | None) -> tuple[list[int], list[int]]:
        """Token ids of one text, or of two as a pair, with what the model wants around them, and of each which segment
        it is of; of more than `most` the longer text loses its end."""
        try:
            for each in (text, other or ""):
                self._weigh(each, self._most or len(each))
            found = self._backend.encode(text) if other is None else self._backend.encode(text, other)
        except (TypeError, UnicodeEncodeError) as error:
            raise InputError("the text has a lone surrogate, which is no character; send valid Unicode") from error
        owners = found.sequence_ids  # None: of what is around the texts
        counts = [owners.count(0), owners.count(1)]
        for _ in range(0 if most is None else len(owners) - most):
            longer = 0 if counts[0] > counts[1] else 1
            counts[longer] = max(0, counts[longer] - 1)
        ids, segments = [], []
        for token, owner, segment in zip(found.ids, owners, found.type_ids, strict=True):
            if owner is not None:
                counts[owner] -= 1
            if owner is None or counts[owner] >= 0:
                ids.append(token)
                segments.append(segment)
        return ids, segments

    def _weigh(self, text: str, most: int) -> None:
        """Part by part; where parts meet there may be some tokens more than in the whole, so twice as many pass."""
        part, found = max(PART, 4 * most), 0
        for start in range(0, len(text) if len(text) > part else 0, part):
            found += len(self._backend.encode_batch_fast([text[start : start + part]])[0].ids)
            if found > 2 * most:
                raise ContextLengthError(f"the text has more than {2 * most} tokens; {most} are the most there may be")

    def encode_on(self, text: str, parse_special: bool = True) -> list[int]:
        """Token ids of a text that goes on from another."""
        if not self.leading:
            return self.encode(text, add_special=False, parse_special=parse_special)
        # Where a text begins, a space is put before it: encode it after a mark instead, and take the mark off.
        mark = self.encode(_MARK, add_special=False)
        return self.encode(_MARK + text, add_special=False, parse_special=parse_special)[len(mark) :]

    def covered(self, ids: Sequence[int], text: str) -> tuple[int, int]:
        """How many of the first ids are exactly how many of the text's first characters. An answer's text leaves out
        its end token, and a stop string may have cut it in the middle of a token."""
        raw, said, found = text.encode("utf-8", "replace"), 0, (0, 0)
        for count, token in enumerate(ids, 1):
            piece = self.token_bytes(token)
            if token in self.special_ids or not piece or not raw.startswith(piece, said):
                break
            said += len(piece)
            if said == len(raw) or raw[said] & 0xC0 != 0x80:  # not in the middle of a character
                found = count, len(raw[:said].decode())
        return found

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Bytes that are no UTF-8 become U+FFFD; ids outside the vocabulary say nothing."""
        table = self.table(skip_special_tokens)
        if table is None:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        size = len(table)
        text = b"".join([table[i] for i in ids if 0 <= i < size]).decode("utf-8", "replace")
        return strip_leading(text, self.leading)

    def token_text(self, token: int) -> str:
        """The token as the vocabulary spells it; '' for an id outside of it."""
        return self._tokens[token] if 0 <= token < len(self._tokens) else ""

    def token_id(self, token: str) -> int | None:
        """The id of a token, spelled as the vocabulary does."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes the token stands for; special tokens stand for their names."""
        if not 0 <= token < len(self._tokens):
            return b""
        if self._pieces is None:
            return self._backend.decode([token], skip_special_tokens=False).encode("utf-8", "replace")
        return self._pieces.table[token]

    def table(self, skip_special_tokens: bool) -> list[bytes] | None:
        """Bytes by token id, or None where the text of a token depends on its neighbours."""
        if self._pieces is None:
            return None
        return self._plain if skip_special_tokens else self._pieces.table

    @property
    def leading(self) -> int:
        """Spaces dropped at the beginning of a text (SentencePiece puts one there)."""
        return self._pieces.leading if self._pieces else 0

    @cached_property
    def _plain(self) -> list[bytes]:
        assert self._pieces is not None
        return [b"" if i in self.special_ids else piece for i, piece in enumerate(self._pieces.table)]

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A second backend that spells special tokens out: the switch is the backend's, not the call's."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend


def strip_leading(text: str, spaces: int) -> str:
    while spaces and text.startswith(" "):
        text, spaces = text[1:], spaces - 1
    return text


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """The tokenizers library meets bad data with bare exceptions and with panics, which are not even Exceptions."""
    try:
        yield
    except QuireError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ModelFileError(f"{what}: {error}") from error
        raise
