"""Benchmarks that other tests do not run: each ends, and its figures are those of what it was asked to do."""

import json

import pytest
from typer.testing import CliRunner

from quire import LLM
from quire.bench import spec
from quire.cli.main import app

pytestmark = pytest.mark.usefixtures("default_model")


@pytest.fixture
def bench(tmp_path):
    def run(*words):
        out = tmp_path / "out.json"
        done = CliRunner().invoke(app, ["bench", *words, "--json", str(out)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(out.read_text()), done.output

    return run


def test_spec(bench):
    words = ("--workload", "edit", "--proposer", "ngram", "--num", "1", "--rounds", "1", "--max-tokens", "24")
    found, text = bench("spec", *words)
    plain, guessed = (found["figures"]["edit"][name] for name in ("off", "ngram"))
    assert plain["drafted"] == 0 and plain["tokens_per_step"] == 1
    assert guessed["drafted"] > 0 and guessed["accepted_length"] >= 1
    assert (guessed["equal"], guessed["answers"]) == (2, 2)  # the round that is not measured too
    assert "2 of 2" in text


class Other(LLM):
    """Answers as if asked something else."""

    def generate(self, prompts, params):
        return super().generate([*prompts, 1], params)


def test_spec_counts_answers_that_differ():
    with LLM(kv_memory="64M") as llm, Other(kv_memory="64M") as other:
        found = spec.compare({"off": llm, "other": other}, "chat", rounds=1, num=2, max_tokens=12, seed=1)
    assert found["off"].equal == found["off"].answers == found["other"].answers == 4
    assert found["other"].equal < 4
    assert spec.rows("chat", found)[1][-1] == f"{found['other'].equal} of 4"
