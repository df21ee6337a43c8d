"""What starting up needed is given back, and what is used again comes back."""

import gc
import subprocess
import sys

import pytest

from quire.engine import gc_control as footprint

PROGRAM = """
import re, torch
from quire.engine.gc_control import shed
def code():
    return int(re.search(r"RssFile:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
before = code()
shed()
after = code()
assert torch.ones(300, 300).matmul(torch.ones(300, 300)).sum() == 300**3
print(before, after)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_code_that_only_loading_ran_is_dropped():
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    before, after = map(int, done.stdout.split())
    assert after < before / 2


@pytest.fixture
def thresholds():
    usual = gc.get_threshold()
    yield gc.set_threshold
    gc.set_threshold(*usual)


def test_whoever_leaves_last_turns_looking_for_garbage_on_again(thresholds):
    thresholds(600, 9, 8)
    with footprint.calm:
        with footprint.calm:
            assert gc.get_threshold()[0] == footprint.GROWTH
        assert gc.get_threshold()[0] == footprint.GROWTH
    assert gc.get_threshold() == (600, 9, 8)


def test_where_garbage_is_never_looked_for_it_stays_so(thresholds):
    thresholds(0)
    with footprint.calm:
        assert gc.get_threshold()[0] == 0


def test_an_idle_engine_looks_for_garbage_when_there_is_much_new(thresholds, monkeypatch):
    thresholds(footprint.GROWTH)
    looked = []
    monkeypatch.setattr(gc, "collect", lambda: looked.append(True))
    monkeypatch.setattr(gc, "get_count", lambda: (footprint.UNTIDY, 0, 0))
    footprint.tidy()
    assert not looked
    monkeypatch.setattr(gc, "get_count", lambda: (footprint.UNTIDY + 1, 0, 0))
    footprint.tidy()
    assert looked
