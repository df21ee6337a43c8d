"""Streams of tokens give the text that decoding everything at once gives, and never half a character."""

from __future__ import annotations

import codecs
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.text import IncrementalDetokenizer, TextModel, Tokenizer

PIECES = ["▁", "▁a", "a", "▁b▁", "b", "ß", "▁你", "好", "🙂", "\n", "▁▁▁"]


def sentencepiece() -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES]
    backend = Backend(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(backend, tokens)


def wordpiece() -> Tokenizer:
    """Words joined by spaces, ## continuing the one before: a token's text depends on its neighbours."""
    tokens = ["[UNK]", "[SEP]", "play", "##ing", "##ed", "the", "dog", ".", "don", "'", "t", "##x"]
    backend = Backend(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("[SEP]", special=True)])
    return Tokenizer(backend, tokens)


def stream(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], skip: bool, cuts: random.Random) -> str:
    decoder = IncrementalDetokenizer(tokenizer, prompt, skip)
    parts, at = [], 0
    while at < len(ids):
        step = cuts.choice((1, 1, 1, 2, 5))
        piece = decoder.push(list(ids[at : at + step]))
        at += step
        parts.append(piece)
    return "".join(parts) + decoder.flush()


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], skip: bool) -> str:
    """By plain means: what the tokens add to the complete characters of the prompt."""
    table = [b"" if skip and i in tokenizer.special_ids else tokenizer.token_bytes(i) for i in [*prompt, *ids]]
    said = codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(table[: len(prompt)]))
    said = said.removeprefix(" ") if tokenizer.leading else said
    whole = tokenizer.decode([*prompt, *ids], skip)
    assert whole.startswith(said)
    return whole[len(said) :]


@pytest.fixture(scope="session")
def byte_level(default_text: TextModel) -> Tokenizer:
    return default_text.tokenizer


@pytest.mark.parametrize("make", [sentencepiece, None])
def test_random_streams_equal_decoding_at_once(make: Callable[[], Tokenizer] | None, byte_level: Tokenizer) -> None:
    tokenizer = make() if make else byte_level
    rng = random.Random(11)
    odd = [
        i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1
    ]  # single bytes: most of the trouble
    everything = range(tokenizer.vocab_size + 3)  # and ids a padded vocabulary has
    for _ in range(1500):
        pools = rng.choice([(odd,), (everything,), (odd, everything)])
        ids = [rng.choice(rng.choice(pools)) for _ in range(rng.randrange(16))]
        prompt = [rng.choice(rng.choice(pools)) for _ in range(rng.choice((0, 0, 1, 5)))]
        for skip in (True, False):
            assert stream(tokenizer, prompt, ids, skip, rng) == continuation(tokenizer, prompt, ids, skip)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.text(max_size=10), st.randoms(use_true_random=False))
def test_texts_come_out_whole(byte_level: Tokenizer, text: str, prompt: str, cuts: random.Random) -> None:
    ids, before = byte_level.encode(text), byte_level.encode(prompt)
    assert stream(byte_level, before, ids, False, cuts) == byte_level.decode(ids, False)


def test_no_character_is_ever_split(byte_level: Tokenizer) -> None:
    text = "日本語 🙂👩‍👩‍👧 naïve ﷽"
    decoder = IncrementalDetokenizer(byte_level, [])
    pieces = [decoder.push([i]) for i in byte_level.encode(text)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == text
    assert "" in pieces  # some tokens end inside a character and must wait
    assert decoder.flush() == ""


def test_an_unfinished_character_comes_with_the_flush(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ok🙂")
    decoder = IncrementalDetokenizer(byte_level, [])
    assert decoder.push(ids[:-1]) == "ok"
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_a_character_the_prompt_began_is_finished_by_the_stream(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("🙂")
    assert len(ids) > 1
    assert IncrementalDetokenizer(byte_level, ids[:-1]).push(ids[-1:]) == "🙂"


def test_sentencepiece_spaces() -> None:
    tokenizer = sentencepiece()
    space_a, bos = tokenizer.encode("a", add_special=False), 1
    space_a = [tokenizer.vocab_size - len(PIECES) + PIECES.index("▁a")]
    assert IncrementalDetokenizer(tokenizer, []).push(space_a) == "a"  # a text begins: its dummy space goes
    assert IncrementalDetokenizer(tokenizer, [bos]).push(space_a) == "a"
    assert IncrementalDetokenizer(tokenizer, space_a).push(space_a) == " a"  # inside a text it is a space
    assert IncrementalDetokenizer(tokenizer, [bos], skip_special_tokens=False).push(space_a) == " a"


def test_special_tokens_are_skipped_or_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|im_end|>b")
    assert IncrementalDetokenizer(byte_level, []).push(ids) == "ab"
    assert IncrementalDetokenizer(byte_level, [], skip_special_tokens=False).push(ids) == "a<|im_end|>b"


@pytest.mark.parametrize("skip", [True, False])
def test_decoders_that_look_at_neighbours(skip: bool) -> None:
    tokenizer = wordpiece()
    assert tokenizer.table(skip) is None
    rng = random.Random(3)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(14))]
        assert stream(tokenizer, [], ids, skip, rng) == tokenizer.decode(ids, skip)
    play, ing, the = 2, 3, 5
    assert IncrementalDetokenizer(tokenizer, [the, play]).push([ing]) == "ing"
    assert IncrementalDetokenizer(tokenizer, [the]).push([play]) == " play"
    assert tokenizer.token_bytes(play) == b"play"


def test_it_is_cheap(byte_level: Tokenizer) -> None:
    """Constant work a token, prompt length aside: the best of a few runs is far under ten microseconds."""
    ids = byte_level.encode("The quick brown fox jumps over the lazy dog, naïvely 🙂. " * 200)
    prompt = ids * 10

    def cost() -> float:
        start = time.perf_counter()
        decoder = IncrementalDetokenizer(byte_level, prompt)
        for token in ids:
            decoder.push([token])
        return (time.perf_counter() - start) / len(ids)

    assert min(cost() for _ in range(5)) < 10e-6


def test_transformers_agrees_on_the_whole(byte_level: Tokenizer, theirs: Any) -> None:
    rng = random.Random(8)
    for _ in range(300):
        ids = [rng.randrange(byte_level.vocab_size) for _ in range(10)]
        assert stream(byte_level, [], ids, True, rng) == theirs.decode(ids, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.data())
def test_covered_tokens_are_the_beginning_of_the_text(default_text: TextModel, text: str, data: st.DataObject) -> None:
    """Of an answer cut anywhere, the tokens kept say exactly the characters they are said to, and no more fit."""
    tokenizer = default_text.tokenizer
    ids = tokenizer.encode_on(text, parse_special=False)
    assume(tokenizer.decode(ids) == text)  # some characters this vocabulary cannot spell
    cut = text[: data.draw(st.integers(0, len(text)))]
    tokens, characters = tokenizer.covered([*ids, *tokenizer.eos_ids], cut)
    assert tokenizer.decode(ids[:tokens]) == cut[:characters]
    assert (tokens == len(ids)) if cut == text else characters <= len(cut)
    following = [tokenizer.decode(ids[:more]) for more in range(tokens + 1, len(ids) + 1)]
    assert not any(cut.startswith(said) and len(said) > characters for said in following)
