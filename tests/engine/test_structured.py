"""Answers under a grammar, over the default model: valid, however they are scheduled; bad grammars refused."""

import json
import re

import jsonschema
import pytest

from quire import LLM, SamplingParams
from quire.generation.grammar import slot_grammars
from quire.generation.grammar.grammar_store import GrammarStore
from quire.types.errors import InputError
from quire.types.grammar import GrammarSpec
from quire.types.request import FinishReason

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "age", "city", "tags"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Describe a person as JSON."}]


def schema(value):
    return GrammarSpec("json_schema", json.dumps(value))


def under(grammar, **params):
    return SamplingParams(**{"temperature": 0, "max_tokens": 120, "grammar": grammar, **params})


@pytest.fixture(scope="module")
def fast(default_model):
    """The compiled path, with a second step in flight."""
    with LLM("smollm2-135m", kv_memory="256M", depth=2) as engine:
        yield engine


@pytest.mark.parametrize("temperature", [0, 1])
def test_schemas_are_kept_and_forced_tokens_take_no_step(fast, temperature, monkeypatch):
    monkeypatch.setattr(slot_grammars, "PATIENCE_S", 60.0)  # an answer whose grammar is late rests for a step
    fast.reset()
    params = under(schema(PERSON), temperature=temperature, seed=3, n=3 if temperature else 1)
    (result,) = fast.chat(ASK, params)
    for output in result.outputs:
        assert output.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(output.text), PERSON)
        assert output.forced_tokens > 8
    stats, outputs = fast.stats(), result.outputs
    assert stats.forced_tokens == sum(o.forced_tokens for o in outputs)
    assert stats.steps == max(len(o.token_ids) - o.forced_tokens for o in outputs)


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (GrammarSpec("regex", r"\d{3}-\d{4}"), r"\d{3}-\d{4}"),
        (GrammarSpec("choice", '["Paris", "London", "New York"]'), "Paris|London|New York"),
        (GrammarSpec("lark", 'start: "I say " WORD ~ 3 "."\nWORD: /[a-z]{1,9}/ " "'), r"I say ([a-z]{1,9} ){3}\."),
    ],
    ids=lambda v: getattr(v, "kind", ""),
)
def test_other_kinds_are_kept(fast, spec, pattern):
    results = fast.generate(["The capital of France is", "Call me at"], under(spec, temperature=1.0, seed=1))
    for result in results:
        assert re.fullmatch(pattern, result.outputs[0].text), result.outputs[0].text
        assert result.outputs[0].finish_reason is FinishReason.STOP


def test_any_object_is_an_object(fast):
    (result,) = fast.chat(ASK, under(GrammarSpec("json_object"), temperature=1.0, seed=4, max_tokens=400))
    assert result.outputs[0].finish_reason is FinishReason.STOP
    assert isinstance(json.loads(result.outputs[0].text), dict)


def test_jumping_ahead_says_what_stepping_says(fast):
    jumped, stepped = fast.chat([ASK, ASK], under(schema(PERSON))), fast.chat(ASK, under(schema(PERSON), logprobs=0))
    assert jumped[0].outputs[0].text == stepped[0].outputs[0].text
    assert jumped[0].outputs[0].forced_tokens > 0 == stepped[0].outputs[0].forced_tokens
    assert len(stepped[0].outputs[0].logprobs) == len(stepped[0].outputs[0].token_ids)


def test_the_same_answer_alone_batched_preempted_and_in_another_process(fast):
    specs = [schema(PERSON), GrammarSpec("regex", "([a-z]{3} ){20}"), None]
    many = [under(spec, max_tokens=40, temperature=t, seed=5) for spec in specs for t in (0, 1)]
    prompt = fast.text.encode_chat(ASK)
    alone = [fast.generate(prompt, params)[0].outputs[0].token_ids for params in many]
    together = [r.outputs[0].token_ids for r in fast.generate([prompt] * len(many), many)]
    assert together == alone
    with LLM("smollm2-135m", kv_pages=14, page_size=16, max_model_len=200, process=True) as small:
        squeezed = [r.outputs[0].token_ids for r in small.generate([prompt] * len(many), many)]
        assert small.stats().preemptions > 0
    assert squeezed == alone


def test_limits_cut_where_they_say(fast):
    whole = fast.chat(ASK, under(schema(PERSON)))[0].outputs[0]
    for length in range(1, 12):
        cut = fast.chat(ASK, under(schema(PERSON), max_tokens=length))[0].outputs[0]
        assert cut.token_ids == whole.token_ids[:length] and cut.finish_reason is FinishReason.LENGTH
    (stopped,) = fast.chat(ASK, under(schema(PERSON), stop=['"age']))[0].outputs
    assert stopped.text == whole.text[: whole.text.index('"age')] and stopped.stop_reason == '"age'


def test_a_stream_is_the_answer_in_pieces(fast):
    whole = fast.chat(ASK, under(schema(PERSON)))[0].outputs[0]
    deltas = list(fast.stream(fast.text.encode_chat(ASK), under(schema(PERSON))))
    assert "".join(d.text for d in deltas) == whole.text
    assert sum(d.forced_tokens for d in deltas) == whole.forced_tokens


def test_the_grammar_has_the_last_word(fast):
    spec = GrammarSpec("choice", '["yes", "no"]')
    (result,) = fast.generate("Well:", under(spec, bad_words=["yes", "no", "y", "n", "ye"]))
    assert result.outputs[0].text in ("yes", "no")


def test_of_several_answers_each_spells_its_own_after_one_prompt(fast):
    prompt = fast.text.tokenizer.encode("The capital of France is")
    options = [" London", " Paris", " Rome wasn't built"]
    each = under(GrammarSpec("each", json.dumps(options)), n=3, logprobs=0)
    fast.reset()
    (result,) = fast.generate([prompt], each)
    assert [output.text for output in result.outputs] == options
    assert fast.stats().prompt_tokens == len(prompt)
    for option, output in zip(options, result.outputs, strict=True):
        (alone,) = fast.generate([prompt], under(GrammarSpec("choice", json.dumps([option])), logprobs=0))
        assert output.token_ids == alone.outputs[0].token_ids
        expected = [entry.logprob for entry in alone.outputs[0].logprobs]
        assert [entry.logprob for entry in output.logprobs] == pytest.approx(expected, abs=0.02)
    for wrong in ({"n": 2}, {"n": 3, "best_of": 4, "temperature": 1}):
        with pytest.raises(InputError, match="let n be as many"):
            fast.generate([prompt], under(each.grammar, **wrong))
    with pytest.raises(InputError, match="list of one or more strings"):
        fast.generate([prompt], under(GrammarSpec("each", "[]"), n=1))


def test_bad_grammars_are_refused_and_others_go_on(fast):
    with pytest.raises(InputError, match="uniqueItems"):
        fast.generate("x", under(schema({"type": "array", "uniqueItems": True})))
    with pytest.raises(InputError, match="contradicts"):
        under(GrammarSpec("json_object"), ignore_eos=True)
    assert fast.generate("x", SamplingParams(max_tokens=2))[0].outputs[0].token_ids


def test_no_grammar_is_compiled_twice_while_its_request_waits(default_model, monkeypatch):
    """One answer at a time, one grammar kept for its own sake: the others are there because their requests are."""
    compiled, compile = [], GrammarStore._compile
    monkeypatch.setattr("quire.generation.grammar.grammar_store.MAX_COMPILED_GRAMMARS", 1)
    monkeypatch.setattr(GrammarStore, "_compile", lambda self, spec: compiled.append(spec) or compile(self, spec))
    words = [f"word{i}" for i in range(6)]
    specs = [GrammarSpec("choice", json.dumps([word])) for word in words]
    with LLM("smollm2-135m", kv_memory="64M", max_model_len=256, max_seqs=1) as small:
        results = small.generate(["x"] * len(specs), [under(spec) for spec in specs])
        assert [result.outputs[0].text for result in results] == words
        assert sorted(spec.source for spec in compiled) == sorted(spec.source for spec in specs)
