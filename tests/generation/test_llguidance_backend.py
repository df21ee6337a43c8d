"""llguidance behind its seam: kinds of grammars, the model's own vocabulary, and grammars meant to do harm."""

import functools
import itertools
import json
import string
import threading

import numpy as np
import pytest

from quire.engine.text_input import check_grammar
from quire.generation.grammar.cost_limits import cost_excess
from quire.generation.grammar.llguidance_backend import LLGuidanceBackend, _run_on_deep_stack
from quire.generation.grammar.sandbox_client import MAX_PROCESSES, GrammarSandbox
from quire.text import TextModel, alphabet_of, load_tokenizer, vocabulary_of
from quire.types.errors import InputError, OverloadedError
from quire.types.grammar import GrammarSpec, Vocabulary


@pytest.fixture(scope="module")
def tokenizer(default_model):
    return load_tokenizer(default_model)


@pytest.fixture(scope="module")
def text(default_model):
    return TextModel.load(default_model)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return vocabulary_of(tokenizer, tokenizer.vocab_size + 100)


@pytest.fixture(scope="module")
def backend():
    return LLGuidanceBackend()


def allowed(grammar, vocabulary):
    row = np.empty(-(-len(vocabulary.tokens) // 8), np.uint8)
    grammar.fill(row)
    return set(np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist())


def schema(value):
    return GrammarSpec("json_schema", json.dumps(value))


PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}

ACCEPTED = [
    (GrammarSpec("json_object"), '{"a": [1, null, "x"], "b": {}}', '[1]'),
    (schema(PERSON | {"required": ["name", "age"]}), '{"name": "Bé\\n", "age": -3}', '{"name": "B", "age": "x"}'),
    (GrammarSpec("regex", r"\d{3}-[a-f]+"), "123-abc", "12-abc"),
    (GrammarSpec("choice", '["ja", "nein", "vielleicht"]'), "vielleicht", "vielen"),
    (GrammarSpec("lark", 'start: "<" WORD ("," WORD)* ">"\nWORD: /[a-z]+/'), "<ab,c>", "<ab,>"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "good", "bad"), ACCEPTED, ids=lambda v: getattr(v, "kind", ""))
def test_each_kind_takes_what_fits_and_nothing_else(backend, vocabulary, tokenizer, spec, good, bad):
    grammar = backend.compile(spec, vocabulary).fork()
    grammar.accept(tokenizer.encode(good, add_special=False))
    assert not grammar.error and (grammar.done or set(vocabulary.ends) <= allowed(grammar, vocabulary))
    grammar = backend.compile(spec, vocabulary).fork()
    grammar.accept(tokenizer.encode(bad, add_special=False))
    assert grammar.error or not (grammar.done or set(vocabulary.ends) & allowed(grammar, vocabulary))


def test_special_tokens_are_no_text_and_padding_is_never_allowed(backend, vocabulary, tokenizer):
    grammar = backend.compile(GrammarSpec("regex", r"(.|\n)*"), vocabulary)
    may = allowed(grammar, vocabulary)
    assert tokenizer.special_ids & may == set(tokenizer.eos_ids)
    assert max(may) < tokenizer.vocab_size
    named = backend.compile(GrammarSpec("lark", 'start: <|im_start|> "x"'), vocabulary)
    assert allowed(named, vocabulary) == {tokenizer.encode("<|im_start|>", add_special=False)[0]}


def test_a_vocabulary_without_ends_still_finishes(backend):
    letters = Vocabulary([b"a", b"b"], frozenset(), [], lambda text: [ord(c) - 97 for c in text])
    grammar = backend.compile(GrammarSpec("regex", "a+b"), letters)
    grammar.accept([0, 0])
    assert not grammar.done and allowed(grammar, letters) == {0, 1}
    grammar.accept([1])
    assert grammar.done


def test_the_door_knows_the_models_special_tokens(text):
    check_grammar(GrammarSpec("lark", 'start: <|im_start|> "x"'), text)
    with pytest.raises(InputError, match="nobody"):
        check_grammar(GrammarSpec("lark", 'start: <|nobody|> "x"'), text)


def chain(length, link, last):
    defs = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return schema({"$ref": "#/$defs/d0", "$defs": defs | {f"d{length}": last}})


def patterns(count, wrap=lambda schema: schema):
    return [wrap({"type": "string", "pattern": f"a.{{{20 + i}}}b"}) for i in range(count)]


def references(count):
    defs = {f"d{i}": each | {"$ref": f"#/$defs/d{i + 1}"} for i, each in enumerate(patterns(count))}
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{count}": {}}}


def late(count, kinds):
    """Patterns that leave an easy way out until a text comes to where they all differ."""
    abc = string.ascii_letters
    ends = [[f"[a{abc[j]}{abc[j + i + 1]}]{abc[i]}{{{j}}}.*" for j in range(1, kinds)] for i in range(count)]
    return [f"[xy]*y|x{{60}}({'|'.join(end)})" for end in ends]


def kinds(count, letter):
    return "|".join(f"[{letter}{chr(0x4E00 + i)}]" for i in range(count))


CONJOINED = {
    "allOf": schema({"allOf": patterns(24)}),
    "references": schema(references(24)),
    "data": schema({"default": patterns(24), "allOf": [{"$ref": f"#/default/{i}"} for i in range(24)]}),
    "options": schema({"allOf": patterns(24, lambda each: {"anyOf": [each]})}),
    "nested options": schema(functools.reduce(lambda inner, each: each | {"anyOf": [inner]}, patterns(24))),
    "properties": schema({"allOf": patterns(24, lambda each: {"properties": {"x": each}})}),
    "others": schema({"properties": {"": {}}, "allOf": patterns(24, lambda each: {"additionalProperties": each})}),
    "items": schema({"allOf": [{"prefixItems": [a]} | {"items": b} for a, b in itertools.pairwise(patterns(24))]}),
    "property names": schema({"patternProperties": {kinds(150, "a"): {}, kinds(150, "b"): {}}}),
    "late": schema({"allOf": [{"type": "string", "pattern": f"^({each})$"} for each in late(4, 20)]}),
    "in lark": GrammarSpec("lark", "start: %json " + json.dumps({"allOf": patterns(24)})),
    "terminals": GrammarSpec("lark", "start: A\nA: " + " & ".join(f"/.*a.{{{20 + i}}}b.*/" for i in range(24))),
    "late terminals": GrammarSpec("lark", "start: A\nA: " + " & ".join(f"/{each}/" for each in late(4, 20))),
    "names": GrammarSpec(
        "lark",
        '# "\nstart: A0 // "\n'
        + "\n".join(f'A{i}.2: ("x" A{i + 1} | A{i + 1}) & ("y" A{i + 1} | A{i + 1})' for i in range(9))
        + "\nA9: /.*a.{20}b.*/",
    ),
}  # fmt: skip


@pytest.mark.parametrize("spec", CONJOINED.values(), ids=CONJOINED)
def test_too_many_patterns_for_one_text_are_counted(spec):
    assert "too many patterns" in cost_excess(spec)


TREE = {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}}}
APART = [
    schema({"type": "object", "properties": {f"p{i}": each for i, each in enumerate(patterns(100))}}),
    schema({"anyOf": patterns(100, lambda each: {"type": "object", "properties": {"id": each}})}),
    schema({"prefixItems": patterns(50), "allOf": [{"type": "array", "items": patterns(1)[0]}]}),
    schema({"$defs": {"tree": TREE}, "prefixItems": [*patterns(20), {"allOf": [{"$ref": "#/$defs/tree"}]}]}),
    schema({"allOf": [{"pattern": "[a-z]"}, {"pattern": "[A-Z]"}, {"pattern": "[0-9]"}, {"format": "email"}]}),
    GrammarSpec("lark", 'start: (A | B)*\nA: /[a-z&]+/ & ~/(.|\\n)*end(.|\\n)*/\nB: "&" | "&&" | /[&|]/ // & &\n'),
]


@pytest.mark.parametrize("spec", APART, ids=["properties", "options", "items", "tree", "few", "text"])
def test_patterns_for_different_texts_are_not_counted_together(spec):
    assert not cost_excess(spec)


REFUSED = [
    (schema({"allOf": [{"$ref": "#named"}, *patterns(12)], "$defs": {"x": {"$anchor": "named"}}}), "only references"),
    (schema({"allOf": patterns(12), "$defs": {"x": {"$id": "http://x/y"}}}), "of its own"),
    (GrammarSpec("lark", '{"grammars": [{"json_schema": {"type": "integer", "multipleOf": 999983}}]}'), "notation"),
    (GrammarSpec("regex", "a{"), "unclosed counted repetition"),
    (GrammarSpec("regex", "(?=a)b"), "look-around"),
    (GrammarSpec("regex", "(" * 100_000), "regex"),
    (GrammarSpec("choice", "[]"), "list of one or more strings"),
    (GrammarSpec("choice", "{"), "list of one or more strings"),
    (GrammarSpec("choice", '["a", 3]'), "list of one or more strings"),
    (GrammarSpec("lark", "start: nobody"), "unknown name"),
    (GrammarSpec("lark", "start: " + "(" * 50_000), "deeply nested"),
    (GrammarSpec("json_schema", "{"), "no JSON"),
    (GrammarSpec("json_schema", "[]"), "object"),
    (GrammarSpec("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000), "nested too deeply"),
    (schema({"type": "nonsense"}), "nonsense"),
    (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    (schema({"$ref": "https://example.com/schema.json"}), "retriev"),
    (schema({"enum": []}), "no value fits"),
    (schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}), "2000 optional"),
    (schema({"properties": {"deep": {"properties": {f"p{i}": {} for i in range(500)}}}}), "500 optional"),
    (schema({"prefixItems": [{"properties": {f"p{i}": {} for i in range(470)}}] * 3}), "together"),
    (schema({"anyOf": [{"properties": {f"p{j}": {"enum": [i, j]} for j in range(99)}} for i in range(9)]}), "items"),
    (schema({"patternProperties": {f"^k{i}x[a-z]*$": {} for i in range(60)}}), "60 patternProperties"),
    (schema({"type": "integer", "multipleOf": 999_983}), "divisor"),
    (schema({"type": "number", "multipleOf": 0.0009765625}), "divisor"),
    (schema({"allOf": [{"type": "integer", "multipleOf": p} for p in (101, 103, 107)]}), "divisor"),
    (GrammarSpec("lark", 'start: "x" %json {"type": "integer", "multipleOf": 999983}'), "divisor"),
]


LARGE = [
    schema({"required": ["p0"], "properties": {f"p{i}": {"type": "string"} for i in range(481)}}),
    schema({"required": [f"p{i}" for i in range(1500)], "properties": {f"p{i}": {} for i in range(1500)}}),
    schema({"anyOf": [{"type": "number", "multipleOf": n} for n in (0.01, 0.5, 1, 5, 100, 10_000)]}),
    schema({"enum": [{"properties": {f"p{i}": 1 for i in range(600)}, "multipleOf": 999_983}, 7]}),
    schema({"enum": [f"value number {i}" for i in range(10_000)]}),
    GrammarSpec("choice", json.dumps([f"value {i}" for i in range(10_000)])),
]


@pytest.mark.parametrize("spec", LARGE, ids=["optional", "required", "divisors", "data", "enum", "choice"])
def test_large_is_not_too_large(tokenizer, spec):
    LLGuidanceBackend().compile(spec, alphabet_of(tokenizer))


@pytest.mark.parametrize(("spec", "reason"), REFUSED)
def test_bad_grammars_are_refused_with_the_reason(text, spec, reason):
    with pytest.raises(InputError, match=reason) as caught:
        check_grammar(spec, text)
    assert caught.value.param == "grammar" and len(str(caught.value)) < 600


def test_a_grammar_too_long_is_not_even_read():
    with pytest.raises(InputError, match="characters"):
        GrammarSpec("regex", "a" * 300_000)


@pytest.mark.parametrize(
    "spec",
    [
        chain(3000, lambda ref: ref, {"type": "string"}),
        chain(1500, lambda ref: {"type": "object", "properties": {"x": ref}, "required": ["x"]}, {"type": "null"}),
        GrammarSpec("lark", "start: R0\n" + "\n".join(f'R{i}: "a" R{i + 1}' for i in range(9000)) + '\nR9000: "b"'),
    ],
    ids=["references", "objects", "terminals"],
)
def test_deep_grammars_do_not_run_off_the_stack(tokenizer, spec):
    LLGuidanceBackend().compile(spec, alphabet_of(tokenizer))


def long_to_compile(name):
    """What nobody counts: many values of many properties."""
    inner = [{f"q{j}": {"enum": [f"{name}{i}{j}{k}" for k in range(20)]} for j in range(20)} for i in range(50)]
    return schema({"properties": {f"p{i}": {"type": "object", "properties": found} for i, found in enumerate(inner)}})


def test_a_compiler_that_takes_too_long_is_ended_and_leaves_nothing_behind(tokenizer, monkeypatch):
    monkeypatch.setattr("quire.generation.grammar.sandbox_client.MAX_WAIT_RATIO", 1e4)
    door, alphabet = GrammarSandbox(0.04), alphabet_of(tokenizer)
    for number in range(MAX_PROCESSES + 1):
        with pytest.raises(InputError, match="longer than"):
            door.check(long_to_compile(f"r{number}"), alphabet)
        assert not any(thread.name == "quire-grammar" for thread in threading.enumerate())
    door.check(GrammarSpec("json_object"), alphabet)


def test_a_process_that_ended_is_replaced(tokenizer):
    door, alphabet = GrammarSandbox(60), alphabet_of(tokenizer)
    for source in ("a", "b"):
        door.check(GrammarSpec("regex", source), alphabet)
        ((_, process),) = door._idle
        process.kill()
        process.wait()


def test_nothing_that_lies_in_the_current_folder_is_imported(tokenizer, monkeypatch, tmp_path):
    (tmp_path / "msgspec.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    GrammarSandbox(60).check(GrammarSpec("regex", "a"), alphabet_of(tokenizer))


def test_what_passed_is_not_tried_again(tokenizer):
    door, alphabet = GrammarSandbox(60), alphabet_of(tokenizer)
    door.check(GrammarSpec("regex", "a"), alphabet)
    door._slots = threading.Semaphore(0)  # whoever has to be tried now finds no room
    door.check(GrammarSpec("regex", "a"), alphabet)


def test_compilers_given_up_leave_room_for_others_when_they_end(tokenizer, monkeypatch):
    monkeypatch.setattr("quire.generation.grammar.llguidance_backend._compiling", threading.Semaphore(1))
    gate = threading.Event()
    with pytest.raises(OverloadedError, match="busy"):  # it computes nothing, and yet does not end
        _run_on_deep_stack(lambda: gate.wait(60), 0.01)
    with pytest.raises(OverloadedError, match="retry"):
        _run_on_deep_stack(lambda: None, 0.01)
    gate.set()
    assert _run_on_deep_stack(lambda: 7, 60) == 7
