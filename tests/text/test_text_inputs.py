"""Plain text out of a call's JSON, cut anywhere; and an answer that is such a text, as a call."""

from __future__ import annotations

import json
import random

import pytest

from quire.text.segments import CallArguments, CallBegun
from quire.text.text_inputs import TextCallReader, TextInput, input_of

TEXTS = ["", "plain", 'a "quoted" \\ line\n\ttab', "€ 😀 \u0000 \\u0041", "ends with \\", "\\\\ud83d", '{}[]"}']


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("ascii", [True, False])
def test_pieces_say_what_the_whole_says(text: str, ascii: bool) -> None:
    written = json.dumps({"input": text}, ensure_ascii=ascii)
    assert input_of(written) == text
    rng = random.Random(len(written))
    for _ in range(50):
        reader, out, at = TextInput(), "", 0
        while at < len(written):
            size = rng.randint(1, 5)
            out += reader.push(written[at : at + size])
            at += size
        assert out == text


def test_what_is_no_such_call_is_its_own_input() -> None:
    assert input_of('{"other": 1}') == '{"other": 1}'
    assert input_of('{"input": "cut sh') == "cut sh"
    assert input_of('{"input": "\\ud83d lone"}') == "\ufffd lone"


@pytest.mark.parametrize("text", TEXTS)
def test_an_answer_as_a_call(text: str) -> None:
    reader = TextCallReader("f")
    segments = [*(segment for character in text for segment in reader.push(character)), *reader.end()]
    assert segments[0] == CallBegun(0, "f")
    written = "".join(segment.text for segment in segments if isinstance(segment, CallArguments))
    assert json.loads(written) == {"input": text}
