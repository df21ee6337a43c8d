"""Random engines under random requests, all at once: each answer is what it is alone on a plain engine, nothing is left
behind, nothing hangs. A case that fails says its seed, what it is, and how to run it again."""

import logging
from pathlib import Path

import pytest
from fuzz_runner import Fuzzer

QUICK, SLOW, PART = 60, 2000, 20  # engines, and of them in one test


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    logging.disable(logging.WARNING)  # options without effect are said, in every case
    made = Fuzzer(Path(tmp_path_factory.mktemp("fuzz")))
    yield made
    made.close()
    logging.disable(logging.NOTSET)
    print(dict(made.seen))


@pytest.mark.parametrize(
    "first",
    [
        *range(0, QUICK, PART),
        *(pytest.param(first, marks=pytest.mark.slow) for first in range(1000, 1000 + SLOW, PART)),
    ],
)
def test_combinations_are_what_their_parts_are(fuzzer, first):
    for seed in range(first, first + PART):
        fuzzer.run(seed)


def test_cases_reach_what_they_are_for(fuzzer):
    """Of the quick ones; the fewest that would do."""
    if fuzzer.seen["requests"] < 4 * QUICK:
        pytest.skip("only some of the cases were run")
    assert fuzzer.seen["refused"] < 0.1 * fuzzer.seen["requests"]
    for name in ("cached_tokens", "forced_tokens", "accepted_tokens", "evicted_tokens"):
        assert fuzzer.seen[name] > 100, fuzzer.seen
    for name in ("preemptions", "tier_tokens", "aborted"):  # when a page has reached its tier is not for us to say
        assert fuzzer.seen[name] > 20, fuzzer.seen
