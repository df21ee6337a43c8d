"""Schemas of every keyword at the token level, in three spellings: nothing invalid is taken, next to nothing valid is
not, and few are refused. A sample here, all 500 in the slow suite."""

from collections import Counter

import pytest
from schema_cases import KEYWORDS, cases, composed

from quire.bench.schema_judge import SERVED, SchemaJudge, escaped, spellings
from quire.types.errors import InputError

COMPACT = (",", ":")
STYLE = {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False}
MAY_BE_REFUSED = {"uniqueItems", "if", "not", "oneOf", "maxContains", "minContains", "enum", "const"}


@pytest.fixture(scope="module")
def judge(default_model):
    return SchemaJudge()


def judged(judge, many):
    counts, refused = Counter(), Counter()
    for name, schema, good, bad in many:
        grammars = {}
        try:
            grammars[SERVED] = judge.compile(schema)
            grammars[COMPACT] = judge.compile(schema | {"x-guidance": STYLE})
        except InputError as error:
            if "no value fits" not in str(error) or good:
                refused[name] += 1
            continue
        for separators, grammar in grammars.items():
            for instance in good:
                counts["valid"] += 1
                if not judge.takes(grammar, instance, separators):
                    counts["rejected"] += 1
                    print("rejected", name, schema, instance)
            for instance in bad:
                wrong = [*spellings(instance, separators), *map(escaped, spellings(instance, separators))]
                taken = [text for text in wrong if judge.takes_text(grammar, text)]
                assert not taken, (name, schema, taken)
                counts["invalid"] += 1
    return counts, refused


def check(judge, count, seed):
    many = cases(count, seed)
    assert {name for name, *_ in many} == set(KEYWORDS) if count >= len(KEYWORDS) else True
    counts, refused = judged(judge, many)
    print(counts, refused)
    assert counts["rejected"] <= 0.01 * counts["valid"], counts
    assert refused.keys() <= MAY_BE_REFUSED and refused.total() <= 0.06 * count, refused
    assert counts["valid"] > 4 * count and counts["invalid"] > 4 * count


def test_a_sample_of_all_keywords(judge):
    check(judge, 38, 7)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_five_hundred_schemas(judge):
    check(judge, 500, 1)


def check_composed(judge, count, seed):
    """What is put together from several may be refused more often, and never means something else."""
    counts, refused = judged(judge, composed(count, seed))
    print(counts, refused)
    assert counts["rejected"] <= 0.02 * counts["valid"] and refused.total() <= 0.25 * count, (counts, refused)
    assert counts["valid"] > count and counts["invalid"] > count


def test_a_sample_of_schemas_put_together(judge):
    check_composed(judge, 40, 3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_five_hundred_schemas_put_together(judge):
    check_composed(judge, 500, 1)
