"""Benchmarks that other tests do not run: each ends, and its figures are those of what it was asked to do."""

import json

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from quire import LLM
from quire.bench import product_measuring
from quire.bench import speculation_bench as spec
from quire.cli.main import app
from quire.engine.link import LocalLink
from quire.kernels.product_choices import ProductChoices, Shape
from quire.types.errors import ConfigError

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


@pytest.mark.slow
def test_interference(bench):
    words = ("--streams", "2", "--prompt", "200", "--in", "8", "--kv-memory", "64M", "--prefill-chunk", "32")
    with pytest.raises(ConfigError, match="give them more"):
        bench("interference", *words, "--out", "8")
    found, text = bench("interference", *words, "--out", "24")
    assert (found["streams"], found["prompt"]) == (2, 200)
    assert 0 < found["alone"]["p50"] <= found["alone"]["p100"] and found["beside"]["p50"] > 0
    assert found["long_ttft"] > 0 and "long prompt" in text


@pytest.mark.slow
def test_structured(bench):
    found, _ = bench("structured", "--num", "2", "--kv-memory", "64M")
    assert found["schemas"] == 2 and found["finished"] == 1
    assert 0 < found["forced_tokens"] < found["output_tokens"]


def test_lora(bench):
    words = ("--adapters", "3", "--rank", "4", "--num", "4", "--in", "8", "--out", "4", "--rounds", "1")
    found, text = bench("lora", *words, "--kv-memory", "64M")
    assert found["targets"] == ["q_proj", "v_proj"] and found["tok_s"]["share"] > 0
    assert "room for 3 adapters" in text and "% of the base" in text
    with pytest.raises(ConfigError, match="no such projection: 'x'"):
        bench("lora", "--targets", "x")


@pytest.mark.slow
def test_beams(bench):
    found, _ = bench("beams", "--width", "3", "--in", "64", "--out", "4", "--rounds", "1", "--kv-memory", "64M")
    assert found["beams"] == 3 and found["pages_alone"] < found["pages_beams"] < 3 * found["pages_alone"]


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


def test_sampling(bench):
    words = (
        "--num",
        "2",
        "--in",
        "8",
        "--out",
        "6",
        "--rounds",
        "1",
        "--forms",
        "top_p,logprobs",
        "--kv-memory",
        "32M",
    )
    found, text = bench("sampling", *words)
    forms = {form["form"]: form for form in found["forms"]}
    assert list(forms) == ["greedy", "top_p", "logprobs"] and forms["greedy"]["over"] == 0
    assert all(form["tokens"] == 12 and len(form["seconds"]) == 1 for form in forms.values())
    assert "temperature=0.7 top_p=0.9" in text
    with pytest.raises(ConfigError, match="no such form of sampling: 'warm'; there are greedy, temperature"):
        bench("sampling", "--forms", "warm")


def test_products(bench, monkeypatch):
    """On a machine that has none to choose from: only with what an engine does there made up."""
    words = ("--max-seqs", "2", "--kv-memory", "64M")
    with pytest.raises(ConfigError, match="by an engine of one GPU"):
        bench("products", *words)

    class Link(LocalLink):
        def __init__(self, core, info):
            super().__init__(core, replace(info, device="cuda:0"))
            left = iter([True, True, False])
            core.executor.idle = lambda quiet: quiet and next(left)

    monkeypatch.setattr("quire.engine.link.LocalLink", Link)
    known = ProductChoices("chip", 1)
    known.put(Shape(2, 576, 576, 8), "library")
    monkeypatch.setattr(product_measuring, "choices", lambda device: known)
    monkeypatch.setattr(product_measuring, "matrices", lambda model: {(2, 576, 576)})
    found, text = bench("products", *words, "--dtype", "bfloat16")
    assert found["choices"] == ["products 576 x 576: measured for 1 numbers of rows: 1 as the library prefers"]
    assert found["choices"][0] in text and 0 <= found["longest_piece_s"] <= found["seconds"]
