"""JSON schemas at the token level: exact where the compiler alone is not, closed where callers expect it, and rewritten
rather than refused. The instances are spelled as the server writes JSON."""

import json
import re

import pytest
from jsonschema import Draft202012Validator

from quire.bench.schema_judge import SchemaJudge
from quire.serve.core.constraints import context_free, json_schema
from quire.serve.core.structural_tags import structural_tag
from quire.types.errors import InputError
from quire.types.grammar import CLOSED, GrammarSpec


@pytest.fixture(scope="module")
def judge(default_model):
    return SchemaJudge()


def compiled(judge, spec):
    return judge._backend.compile(spec, judge.vocabulary)


def taken(judge, grammar, texts):
    return [text for text in texts if judge.takes_text(grammar, text)]


BIG = 2**53
NOT_SEVEN = {"not": {"const": 7}}
EXACT = {
    "escaped names": (
        {"properties": {"a": {"type": "integer"}}},
        ['{"a": 1}', '{"b": "x"}'],
        [r'{"\u0061": "x"}', '{"a": "x"}', r'{"b\u0061": 1}'],
    ),
    "large maximum": (
        {"type": "integer", "maximum": BIG + 1},
        [str(BIG), "7"],
        [str(BIG + 2), str(BIG + 3)],
    ),
    "64 bits": ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["-5", str(BIG)], [str(2**63)]),
    "as large as can be": ({"type": "number", "maximum": 1.7976931348623157e308}, ["-5", "0.5"], ["true"]),
    "large bounds left out": ({"type": "integer", "exclusiveMaximum": BIG + 2}, ["1"], [str(BIG + 2), str(BIG + 4)]),
    "one of repeated names": (
        {"properties": {"a": True}, "minProperties": 2, "required": ["a"]},
        ['{"a": 1, "b": 2}'],
        ['{"a": 1}', '{"a": 1, "a": 2}'],
    ),
    "numbers that are equal": ({"enum": [1.0, 2]}, ["1", "2"], ["1.5", "3"]),
    "an open end near the other": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        ["0.1", "0.5", "0.0001"],
        ["0", "0.0", "0.00", "0.6"],
    ),
    "an open end near the other, further on": (
        {"anyOf": [{"exclusiveMinimum": 1, "exclusiveMaximum": 1.25}, NOT_SEVEN | {"minimum": 7, "maximum": 7.5}]},
        ["1.1", "7.5"],
        ["1", "1.0", "1.25", "7", "7.0"],
    ),
    "an open end below nothing": (
        {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0},
        ["-0.5", "-0.001"],
        ["0", "-0", "-0.0"],
    ),
    "no true for one": ({"const": 1}, ["1"], ["true"]),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), EXACT.values(), ids=EXACT)
def test_what_is_said_is_meant_exactly(judge, schema, good, bad):
    grammar = judge.compile(schema)
    assert taken(judge, grammar, [*good, *bad]) == good


REFUSED = {
    "const": ({"const": BIG + 1}, "2\\^53"),
    "enum": ({"enum": [1, {"a": [-BIG - 1]}]}, "2\\^53"),
    "minimum": ({"type": "integer", "minimum": BIG + 1}, "2\\^53"),
    "two names that may be the same": ({"type": "object", "minProperties": 2}, "minProperties"),
    "control characters": ({"const": "a\x00b"}, "control character"),
    "many different strings": ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
    "what a pattern is not": ({"type": "string", "not": {"pattern": "a.*b"}}, "pattern"),
    "remote": ({"$ref": "https://example.com/schema"}, "retrieved"),
    "nothing fits": ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no value fits"),
    "no number": ({"enum": [1, float("nan")]}, "nan is no number"),
    "no bound": ({"type": "integer", "minimum": float("inf")}, "minimum must be a number"),
    "names that are none": ({"type": "object", "required": "ab"}, "required must be a list of names"),
    "too narrow": ({"exclusiveMinimum": 1, "maximum": 1.00000000000001}, "too narrow"),
    "too many digits": ({"type": "number", "minimum": 1e-300}, "too many digits"),
    "only itself": ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "itself"),
    "an anchor inside": ({"type": "string", "pattern": "a^b"}, "only where a pattern begins"),
    "too many ways": ({"oneOf": [{"properties": {f"p{i}": {"minimum": i} for i in range(9)}}] * 9}, "too many ways"),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_kept_to_is_refused_in_plain_words(judge, schema, reason):
    with pytest.raises(InputError, match=reason) as caught:
        judge.compile(schema)
    names = ("lexer", "derivre", "earley", "llguidance", "fuel", "extensionbias", "lookarounds not supported yet")
    assert not any(word in str(caught.value).lower() for word in names)


@pytest.mark.parametrize(
    ("grammar", "reason"), [('start: "a" "b', "1\\(14\\)"), ("start: fuel", 'unknown name: "fuel"')]
)
def test_an_error_of_syntax_is_not_called_complex(judge, grammar, reason):
    with pytest.raises(InputError, match=reason):
        compiled(judge, GrammarSpec("lark", grammar))


def closed_object(**properties):
    return {"type": "object", "properties": properties, "required": [*properties][:1], "additionalProperties": False}


TEN = {f"p{i}": {"type": "integer"} for i in range(10)}
LETTERS = list("abcdefghijkl")
DAYS = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
KEPT_TO = {
    "closed objects with names of their own": (
        {"oneOf": [closed_object(a={"type": "string"}), closed_object(b={"type": "integer"})]},
        ['{"a": "x"}', '{"b": 1}'],
        ["{}", '{"a": "x", "b": 1}'],
    ),
    "closed objects that share a name": (
        {"oneOf": [closed_object(a=True, b={"type": "integer"}), closed_object(a=True, c={"type": "integer"})]},
        ['{"a": 1, "b": 1}', '{"a": 1, "c": 1}'],
        ['{"a": 1}', '{"a": 1, "b": 1, "c": 1}', '{"b": 1}'],
    ),
    "one of many": (
        {"type": "object", "properties": TEN, "minProperties": 1, "additionalProperties": False},
        ['{"p0": 1}', '{"p9": 1}', '{"p1": 1, "p9": 2}'],
        ["{}", '{"q": 1}'],
    ),
    "two of many": (
        {"type": "object", "properties": TEN, "minProperties": 2, "additionalProperties": False},
        ['{"p0": 1, "p9": 1}', '{"p1": 1, "p2": 2, "p3": 3}'],
        ["{}", '{"p4": 1}'],
    ),
    "one of many, or another": (
        {"type": "object", "properties": TEN, "minProperties": 1},
        ['{"p3": 1}', '{"z": 1}'],
        ["{}"],
    ),
    "at most one of many": (
        {"type": "object", "properties": TEN, "maxProperties": 1, "additionalProperties": False},
        ["{}", '{"p3": 1}'],
        ['{"p3": 1, "p4": 1}'],
    ),
    "conditions on one property": (
        {
            "type": "object",
            "properties": {"t": {"enum": LETTERS}} | {f"f{c}": {"type": "integer"} for c in LETTERS},
            "required": ["t"],
            "additionalProperties": False,
            "allOf": [{"if": {"properties": {"t": {"const": c}}}, "then": {"required": [f"f{c}"]}} for c in LETTERS],
        },
        ['{"t": "a", "fa": 1}', '{"t": "l", "fl": 1}', '{"t": "b", "fa": 1, "fb": 2}'],
        ['{"t": "a"}', '{"t": "a", "fb": 1}', '{"t": "x"}'],
    ),
    "different days, as they are listed": (
        {"type": "array", "items": {"enum": DAYS}, "uniqueItems": True, "minItems": 1},
        ['["tue"]', '["mon", "sun"]', json.dumps(DAYS)],
        ["[]", '["mon", "mon"]', '["mon", "tue", "mon"]'],
    ),
}  # fmt: skip


def test_what_is_wrong_with_a_part_is_said_without_the_grammar_around_it(judge):
    part = json.dumps({"type": "object", "properties": {"a": {"type": "string", "pattern": "(a)\\1"}}})
    for spec in (
        GrammarSpec("lark", f'start: "<tool_call>" tool0\ntool0: %json {part}'),
        GrammarSpec("regex", "(a)\\1"),
    ):
        with pytest.raises(InputError, match=r"backreferences are not supported$") as caught:
            compiled(judge, spec)
        assert not any(word in str(caught.value) for word in ("start", "tool", "json-schema:", "at "))


@pytest.mark.parametrize(("schema", "good", "bad"), KEPT_TO.values(), ids=KEPT_TO)
def test_ordinary_schemas_are_kept_to(judge, schema, good, bad):
    grammar = judge.compile(schema)
    assert taken(judge, grammar, [*good, *bad]) == good


PATTERNS = {
    "pydantic's decimals": (
        r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
        ["1", "-1.50", ".5", "+0012."],
        ["", ".", "+", "-.", "1.2.3"],
    ),
    "zod's addresses": (
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        ["a@b.co", "a.b+c@d-e.org"],
        [".a@b.co", "a..b@c.co", "a.@b.co", "a@b"],
    ),
    "passwords": (r"^(?=.*[A-Z])(?=.*\d).{4,}$", ["Abc1", "1bCde"], ["abc1", "Abcd", "Ab1"]),
    "no word": (r"^(?!foo|ba-)[a-z-]+$", ["fo", "barn", "food"[:2] + "x"], ["foo", "food", "ba-r", ""]),
    "not just a word": (r"^(?!foo$)[a-z]+$", ["food", "fo"], ["foo"]),
    "no two in a row": (r"^(?!.*--)[a-z-]+$", ["a-b-", "-"], ["a--b", "--"]),
    "no such pair": (r"^(?!.*ab)[a-c]+$", ["aac", "ba"], ["ab", "caab"]),
    "not of a kind first": (r"^(?!\d)(?![_.])\w+$", ["a1"], ["1a", "_a"]),
}  # fmt: skip


@pytest.mark.parametrize(("pattern", "good", "bad"), PATTERNS.values(), ids=PATTERNS)
def test_lookaheads_at_the_beginning(judge, pattern, good, bad):
    assert [text for text in [*good, *bad] if re.search(pattern, text)] == good
    grammar = judge.compile({"type": "string", "pattern": pattern})
    assert taken(judge, grammar, [json.dumps(text) for text in [*good, *bad]]) == [json.dumps(text) for text in good]


@pytest.mark.parametrize("pattern", ["a(?!b)", "^(?!a.c)x", "^(?=a)b|c", "^(?!a|b$)c", "^a(?<=a)$", "^(?!(?!a)b)c"])
def test_other_lookaheads_are_refused(judge, pattern):
    with pytest.raises(InputError, match="look-around"):
        judge.compile({"type": "string", "pattern": pattern})


def closed(schema):
    return {CLOSED: True} | schema


AB = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CASES = {
    "declared": (AB, ["{}", '{"a": 1}', '{"a": 1, "b": 2}'], ['{"c": 1}', '{"a": 1, "c": 2}']),
    "opened": (AB | {"additionalProperties": True}, ['{"c": 1}'], ['{"a": "x"}']),
    "typed": (AB | {"additionalProperties": {"type": "null"}}, ['{"c": null}'], ['{"c": 1}']),
    "nothing declared": ({"type": "object"}, ["{}", '{"c": 1}'], ["[]"]),
    "declared to be empty": ({"type": "object", "properties": {}}, ["{}"], ['{"c": 1}']),
    "required only": (AB | {"required": ["c"]}, ['{"c": 1}', '{"a": 1, "c": 2}'], ['{"a": 1}', '{"c": 1, "d": 1}']),
    "below": ({"properties": {"x": AB}, "required": ["x"]}, ['{"x": {"a": 1}}'], ['{"x": {"c": 1}}']),
    "in a list": ({"type": "array", "items": AB}, ['[{"a": 1}]'], ['[{"c": 1}]']),
    "all of several": (
        {"allOf": [{"properties": {"a": True}}, {"properties": {"b": True}}], "type": "object"},
        ['{"a": 1, "b": 1}'],
        ['{"a": 1, "c": 1}'],
    ),
    "a reference beside properties": (
        {"properties": {"c": True}, "$ref": "#/$defs/ab", "$defs": {"ab": AB}, "type": "object"},
        ['{"c": 1, "a": 1}'],
        ['{"d": 1}'],
    ),
    "one of two": (
        {"properties": {"k": True}, "anyOf": [{"properties": {"a": True}}, {"properties": {"b": True}}]},
        ['{"k": 1, "a": 1}', '{"k": 1, "b": 1}'],
        ['{"k": 1, "c": 1}'],
    ),
    "patterns": (
        {"type": "object", "properties": {"a": True}, "patternProperties": {"^x": {"type": "null"}}},
        ['{"a": 1, "x1": null}'],
        ['{"a": 1, "y": null}', '{"x1": 1}'],
    ),
    "unevaluated": (AB | {"unevaluatedProperties": {"type": "null"}}, ['{"c": null}'], ['{"c": 1}']),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES.values(), ids=CASES)
def test_objects_have_the_properties_they_declare(judge, schema, good, bad):
    grammar = judge.compile(closed({"type": "object"} | schema if "type" not in schema else schema))
    assert taken(judge, grammar, [*good, *bad]) == good


def test_strict_false_opens_and_text_is_a_schema(judge):
    schema = {"type": "object"} | AB
    for given, more in ((schema, False), (json.dumps(schema), False)):
        grammar = compiled(judge, json_schema(given, "p"))
        assert judge.takes_text(grammar, '{"a": 1}') and judge.takes_text(grammar, '{"c": 1}') is more
    assert judge.takes_text(compiled(judge, json_schema(schema, "p", strict=False)), '{"c": 1}')
    for wrong in ("{", "[]"):
        with pytest.raises(InputError) as caught:
            json_schema(wrong, "p")
        assert caught.value.param == "p"


def test_white_space_as_asked_for(judge):
    grammar = compiled(judge, json_schema({"type": "object"} | AB, "p", whitespace=r"[ \n]{0,2}"))
    texts = ['{"a":1}', '{ "a" :  1,\n"b":2}', '{   "a":1}', '{"a":\t1}']
    assert taken(judge, grammar, texts) == texts[:2]


def test_gbnf(judge):
    source = 'root ::= item ("," item)*  # a list\nitem ::= "\\x41" [0-9\\u00e9]+ | sub-list\nsub-list ::= "(" item ")"'
    grammar = compiled(judge, context_free(source, "p"))
    texts = ["A1", "A12,Aé", "(A7)", "B1", "A", "A1,"]
    assert taken(judge, grammar, texts) == texts[:3]
    lines = compiled(judge, context_free('root ::= "a"  # one\n  | "|"\n\n  | b\nb ::= "b"', "p"))
    assert taken(judge, lines, ["a", "|", "b", "c"]) == ["a", "|", "b"]
    for wrong, reason in (('root ::= "a" b', "'b' not found"), ('root ::= ("a"', "Expected"), ('x ::= "a"', "root")):
        with pytest.raises(InputError, match=reason):
            compiled(judge, context_free(wrong, "p"))
    assert context_free('start: "a"', "p").kind == "lark"


TAG = {"begin": "<f=x>", "schema": {"type": "object"} | AB, "end": "</f>"}


@pytest.mark.parametrize(
    "given",
    [
        {"type": "structural_tag", "structures": [TAG], "triggers": ["<f="]},
        json.dumps({"type": "structural_tag", "structures": [TAG], "triggers": ["<f="]}),
        {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["<f="],
                "tags": [
                    {"begin": "<f=x>", "end": "</f>", "content": {"type": "json_schema", "json_schema": TAG["schema"]}}
                ],
            },
        },
    ],
    ids=["structures", "text", "format"],
)
def test_structural_tags(judge, given):
    grammar = compiled(judge, structural_tag(given, "p"))
    good = ["nothing of the kind", '<f=x>{"a": 1}</f>', 'so: <f=x>{}</f> and <f=x>{"b": 2}</f>.', "a <f is no tag"]
    bad = ["<f=y>", '<f=x>{"c": 1}</f>', "<f=x>{}"]
    assert taken(judge, grammar, [*good, *bad]) == good


THINK = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": ["</think>", "<|/think|>"]}
JSON_TAG = {"type": "tag", "begin": "<j>", "end": "</j>", "content": {"type": "json_schema", "json_schema": AB}}
FORMATS = {
    "any text ends with its tag": (
        THINK,
        ["<think>a < b\n</think>", "<think></think>"],
        ["<think>a", "<think>a</think>b"],
    ),
    "text, then JSON": (
        {"type": "sequence", "elements": [THINK, {"type": "json_schema", "json_schema": AB}]},
        ['<think>hm</think>{"a": 1}'],
        ["<think>hm</think>x", '{"a": 1}'],
    ),
    "tags within a tag": (
        {
            "type": "tag",
            "begin": "(",
            "end": ")",
            "content": {"type": "triggered_tags", "triggers": ["<j"], "tags": [JSON_TAG]},
        },
        ['(so <j>{"a": 1}</j>, <j>{}</j> it is)', "(no)"],
        ["(no", "(<j>{}</j>", "(a) b"],
    ),
    "words left out": (
        {"type": "triggered_tags", "triggers": ["<j"], "tags": [JSON_TAG], "excludes": ["bad"]},
        ["good <j>{}</j>"],
        ["bad <j>{}</j>", "<j>{}</j> bad"],
    ),
    "slashes": ({"type": "regex", "pattern": r"https?:\/\/[a-z]+/\d"}, ["http://ab/1"], [r"http:\/\/ab/1"]),
    "any value": ({"type": "json_schema", "json_schema": True}, ["1", '"x"'], ["x"]),
    "no end": (JSON_TAG | {"end": ""}, ['<j>{"a": 1}'], ["<j>"]),
}  # fmt: skip


@pytest.mark.parametrize(("format", "good", "bad"), FORMATS.values(), ids=FORMATS)
def test_formats_of_structural_tags(judge, format, good, bad):
    grammar = compiled(judge, structural_tag({"type": "structural_tag", "format": format}, "p"))
    assert taken(judge, grammar, [*good, *bad]) == good


def test_json_in_a_grammar_is_written_as_elsewhere(judge):
    texts = ['{"a": 1, "b": 2}', '{"a":1,"b":2}', '{ "a": 1}', '{"a": \n\n 1}']
    for schema, good in (({}, texts[:1]), ({"x-guidance": {"item_separator": ",", "key_separator": ":"}}, texts[1:2])):
        source = "start: %json " + json.dumps({"type": "object"} | AB | schema)
        assert taken(judge, compiled(judge, GrammarSpec("lark", source)), texts) == good


def test_structural_tags_that_make_no_sense():
    for given in (
        {},
        {"structures": [TAG], "triggers": ["<g"]},
        {"format": {"type": "nonsense"}},
        "{",
        {"structures": 3},
    ):
        with pytest.raises(InputError) as caught:
            structural_tag(given, "p")
        assert caught.value.param == "p"


def test_data_is_no_schema(judge):
    data = {"id": "http://x/y", "$ref": "#/nowhere", "type": "nonsense"}
    schema = {"type": "object", "properties": {"id": {"type": "string"}}, "examples": [data], "default": data}
    assert judge.takes_text(judge.compile(schema), '{"id": "x"}')
    assert judge.takes_text(judge.compile({"enum": [{"$ref": "#/nowhere"}]}), '{"$ref": "#/nowhere"}')


def test_schemas_in_a_lark_grammar_are_rewritten(judge):
    schema = {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 10}, {"not": {}}], "x": 1}
    grammar = compiled(judge, GrammarSpec("lark", 'start: "<" a ">"\na: %json ' + json.dumps(schema)))
    assert taken(judge, grammar, ["<7>", "<12>", "<x>"]) == ["<7>"]
    named = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammar = compiled(judge, GrammarSpec("lark", "start: %json " + json.dumps(named)))
    assert taken(judge, grammar, ['{"a": 1}', '{"b": "x"}', r'{"\u0061": "x"}']) == ['{"a": 1}', '{"b": "x"}']


CHARACTERS = ['"', "\\", "\n", "\t", "\b", "a", "/", "]", "é"]


@pytest.mark.parametrize(
    "pattern",
    [
        '^[^"]$',
        r"^[^\\]$",
        r'^[^"\\]$',
        r'^[^"\n]$',
        r'^[^a-z"]$',
        r"^[\x00-!#-~]$",
        r"^[\x00-\x1f]$",
        r'^[^]"]$',
        r"^[^a]$",
    ],
)
def test_classes_take_no_quote_that_they_leave_out(judge, pattern):
    """However it is spelt; the compiler alone takes an escaped one where a class has other control characters."""
    matcher = re.compile(pattern)
    grammar = judge.compile({"type": "string", "pattern": pattern})
    named = judge.compile(
        {
            "type": "object",
            "patternProperties": {pattern: {"const": {"pattern": '[^"]'}}},
            "additionalProperties": False,
        }
    )
    for character in CHARACTERS:
        text = json.dumps(character, ensure_ascii=False)
        fits = matcher.fullmatch(character) is not None
        assert judge.takes_text(grammar, text) == fits, character
        assert judge.takes_text(named, f'{{{text}: {{"pattern": "[^\\"]"}}}}') == fits, character


def test_what_is_left_out_is_left_out_with_its_escapes(judge):
    grammar = judge.compile({"not": {"enum": ['a"b', "c\\d", "x"]}})
    assert not any(judge.takes_text(grammar, json.dumps(value)) for value in ('a"b', "c\\d", "x"))
    assert all(judge.takes_text(grammar, json.dumps(value)) for value in ('a"', "c\\", "y", 'a"bc'))


@pytest.mark.parametrize(
    "schema, fitting",
    [
        ({"enum": ["a", "b"], "not": {"pattern": "^b"}}, "a"),
        ({"enum": [3, 4, "x"], "not": {"multipleOf": 3}}, 4),
        ({"oneOf": [{"enum": ["a", "ba"]}, {"pattern": "^b"}]}, "a"),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"], "not": {"pattern": "^b"}}}, {"a": 1}),
    ],
)
def test_constants_that_a_not_leaves_out(judge, schema, fitting):
    """What cannot be said of all values can be told of each constant."""
    grammar = judge.compile(schema)
    validator = Draft202012Validator(schema)
    for value in (3, 4, "a", "b", "ba", "x", {"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {}):
        taken = judge.takes_text(grammar, json.dumps(value))
        assert not taken or validator.is_valid(value), value
        assert taken or value != fitting, value


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "2020-01-01", "not": {"format": "date"}},
        {"const": [1, 2], "not": {"uniqueItems": True}},
        {"const": {"b": 1}, "not": {"patternProperties": {"b": {"type": "integer"}}}},
        {"oneOf": [{"type": "object", "unevaluatedProperties": {"type": "integer"}}, {"const": {}}]},
        {"type": "object", "propertyNames": {"not": {"pattern": "^b"}}},
    ],
)
def test_what_cannot_be_told_of_a_constant_is_refused(judge, schema):
    with pytest.raises(InputError, match="cannot be told"):
        judge.compile(schema)


@pytest.mark.parametrize("out", [0, 3, 9])
def test_numbers_left_out_beyond_a_bound_do_not_move_it(judge, out):
    grammar = judge.compile({"type": "integer", "exclusiveMinimum": 2, "maximum": 5, "not": {"const": out}})
    fitting = [str(n) for n in (3, 4, 5) if n != out]
    assert taken(judge, grammar, map(str, range(-1, 12))) == fitting


def test_options_that_are_there_twice_cost_nothing(judge):
    """Each copy doubled the ways to read an object: this was refused as too ambiguous, or for the time that took."""
    option = {"properties": {f"p{i}": {"enum": [i, 318]} for i in range(100)}}
    texts = ['{"p7": 318, "p99": 99}', '{"p7": 8}']
    assert taken(judge, judge.compile({"anyOf": [option] * 20}), texts) == texts[:1]
    grammar = judge.compile({"anyOf": [{"const": 1}, {"const": True}, {"const": 1}]})
    assert taken(judge, grammar, ["1", "true", "false"]) == ["1", "true"]
