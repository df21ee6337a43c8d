"""The memory benchmarks on a small scale: the same tokens in every run, and figures that add up."""

import pytest

from quire.bench.memory import conversation_rows, conversations, oversubscribed, oversubscribed_rows
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError


@pytest.fixture(scope="module")
def options(default_model):
    return EngineOptions.of(threads=1, kv_host="64M", max_seqs=8)


def test_conversations_hit_more_with_tiers(options):
    found = conversations(options, ["off", "host+disk"], clients=4, rounds=3, n_in=40, n_out=4, share=0.3)
    off, tiers = found["runs"]["off"], found["runs"]["host+disk"]
    assert off["same_tokens"] and tiers["same_tokens"]
    assert tiers["hit_rate"] > off["hit_rate"] and sum(tiers["tier_tokens"].values()) > 0
    assert len(conversation_rows(found)) == 3


def test_a_set_of_tiers_must_exist(options):
    with pytest.raises(ConfigError, match="needs a server"):
        conversations(options, ["remote"], clients=1, rounds=1, n_in=4, n_out=1, share=1)
    with pytest.raises(ConfigError, match="no such set"):
        conversations(options, ["attic"], clients=1, rounds=1, n_in=4, n_out=1, share=1)


@pytest.mark.slow
def test_oversubscribed_runs_agree(options):
    found = oversubscribed(options, num=12, n_in=20, n_out=30, over=4)
    runs = found["runs"]
    assert all(run["same_tokens"] and run["most_preemptions"] <= 4 for run in runs.values())
    assert runs["recompute"]["swaps"] == 0 and runs["swap"]["swaps"] == runs["swap"]["preemptions"]
    assert len(oversubscribed_rows(found)) == 5
