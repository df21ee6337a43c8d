"""Rates and latencies from traces made by hand, where every figure can be counted."""

import json

import pytest
from typer.testing import CliRunner

from quire.bench.offline import Trace
from quire.bench.report import percentile, speeds, spread
from quire.cli.main import app


def trace(prompt, times):
    return Trace(prompt=prompt, tokens=[7] * len(times), times=times, end=times[-1])


def test_decode_is_counted_from_the_last_first_token():
    found = speeds([trace(10, [1.0, 2.0, 3.0, 4.0]), trace(30, [2.0, 3.0, 4.0, 5.0])], 5.0)
    assert found["prefill_tok_s"] == 40 / 2.0
    assert found["decode_tok_s"] == 5 / 3.0  # after 2.0: two of the first stream, three of the second
    assert found["output_tok_s"] == 8 / 5.0 and found["total_tok_s"] == 48 / 5.0
    assert found["ttft_s"]["mean"] == 1.5 and found["itl_s"]["p99"] == 1.0


def test_one_token_each_has_no_decode():
    found = speeds([trace(10, [1.0]), trace(10, [2.0])], 2.0)
    assert found["decode_tok_s"] is None and found["tpot_s"]["p50"] is None
    assert "NaN" not in json.dumps(found)


def test_percentiles_interpolate():
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert spread([1.0])["p99"] == 1.0


def test_latency_reports_one_stream(default_model, tmp_path):
    out = tmp_path / "out.json"
    words = ["bench", "latency", "--in", "40", "--out", "6", "--repeats", "2", "--kv-memory", "64M"]
    done = CliRunner().invoke(app, [*words, "--json", str(out)], catch_exceptions=False)
    assert "TTFT ms" in done.output and "decode" in done.output
    found = json.loads(out.read_text())
    assert (found["input_tokens"], found["output_tokens"], found["repeats"]) == (40, 6, 2)
    assert found["prefill_tok_s"] == pytest.approx(40 / found["ttft_s"]["p50"])
    assert found["decode_tok_s"] == pytest.approx(1 / found["tpot_s"]["p50"])
    assert found["itl_s"]["p50"] <= found["itl_s"]["p99"]
