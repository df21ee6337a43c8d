"""Comparing with a peer: the arithmetic always, the peer itself where llama-cpp-python is installed."""

import importlib.metadata
import json

import pytest
from typer.testing import CliRunner

from quire.assets.local import LocalModel
from quire.bench.peer import FIGURES, LlamaCpp, common_prefix, medians, ratios
from quire.bench.workloads import fixed, shared_prefix
from quire.cli.main import app
from quire.types.errors import ConfigError

SPEED = {"output_tok_s": 10.0, "decode_tok_s": 20.0, "prefill_tok_s": 40.0, "ttft_p50_s": 0.5, "itl_p50_s": 0.1}


def test_ratios_are_against_the_best_file_and_above_one_when_we_are_better():
    ours = {"output_tok_s": 30.0, "decode_tok_s": 10.0, "prefill_tok_s": 80.0, "ttft_p50_s": 0.1, "itl_p50_s": 0.2}
    other = {**SPEED, "output_tok_s": 15.0, "ttft_p50_s": 0.2, "decode_tok_s": None}
    found = ratios(ours, [SPEED, other])
    assert found == pytest.approx(
        {"output_tok_s": 2.0, "decode_tok_s": 0.5, "prefill_tok_s": 2.0, "ttft_p50_s": 2.0, "itl_p50_s": 0.5}
    )


def test_what_was_not_measured_has_no_ratio():
    nothing = {**SPEED, "decode_tok_s": None}
    assert "decode_tok_s" not in ratios(nothing, [SPEED]) and "decode_tok_s" not in ratios(SPEED, [nothing])


def test_medians_go_figure_by_figure():
    rounds = [{"a": 3, "t": {"p50": 1.0}, "n": None}, {"a": 1, "t": {"p50": 9.0}, "n": None},
              {"a": 2, "t": {"p50": 2.0}, "n": None}]  # fmt: skip
    assert medians(rounds) == {"a": 2, "t": {"p50": 2.0}, "n": None}


def test_the_shared_prefix_leaves_each_prompt_a_token():
    assert common_prefix(shared_prefix(4, 50, 6, 7)) == 50
    assert common_prefix(fixed(3, 20, 2)) == 0
    assert common_prefix([([1, 2, 3], 1), ([1, 2, 3], 1)]) == 2
    assert common_prefix(fixed(1, 20, 2)) == 0


def test_a_missing_peer_names_the_remedy(monkeypatch, tmp_path):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match="pip install llama-cpp-python"):
        LlamaCpp(LocalModel("m", tmp_path / "m.gguf", "gguf"), "none", threads=1, streams=1)


def test_only_gguf_models_have_this_peer(tmp_path):
    with pytest.raises(ConfigError, match="GGUF"):
        LlamaCpp(LocalModel("m", tmp_path, "safetensors"), "none", threads=1, streams=1)


@pytest.mark.parametrize("workload", ["fixed", "shared_prefix"])
def test_the_same_work_through_llama_cpp(default_model, tmp_path, workload):
    pytest.importorskip("llama_cpp", exc_type=ImportError)
    out = tmp_path / "out.json"
    done = CliRunner().invoke(
        app,
        ["bench", "throughput", "--workload", workload, "--num", "3", "--prefix", "40", "--in", "8", "--out", "4",
         "--kv-memory", "64M", "--peer", "llama-cpp", "--peer-requantise", "none", "--rounds", "1",
         "--seed", "0", "--json", str(out)],  # a seed without near ties, which libraries round otherwise
        catch_exceptions=False,
    )  # fmt: skip
    assert done.output.count("ratio") == len(FIGURES)
    found = json.loads(out.read_text())
    assert set(found["ratios"]) == set(FIGURES)
    assert found["peer"]["variants"]["as shipped"]["median"]["output_tok_s"] > 0
    assert found["same_first_token"] == 1.0
