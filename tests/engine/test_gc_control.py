"""What starting up needed is given back, and what is used again comes back."""

import gc
import subprocess
import sys

import pytest

from quire.engine import gc_control

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
    with gc_control.calm:
        with gc_control.calm:
            assert gc.get_threshold()[0] == gc_control.MAX_NEW_OBJECTS
        assert gc.get_threshold()[0] == gc_control.MAX_NEW_OBJECTS
    assert gc.get_threshold() == (600, 9, 8)


def test_where_garbage_is_never_looked_for_it_stays_so(thresholds):
    thresholds(0)
    with gc_control.calm:
        assert gc.get_threshold()[0] == 0


def test_an_idle_engine_looks_for_garbage_when_there_is_much_new(thresholds, monkeypatch):
    thresholds(gc_control.MAX_NEW_OBJECTS)
    looked = []
    monkeypatch.setattr(gc, "collect", lambda: looked.append(True))
    monkeypatch.setattr(gc, "get_count", lambda: (gc_control.IDLE_NEW_OBJECTS, 0, 0))
    gc_control.tidy()
    assert not looked
    monkeypatch.setattr(gc, "get_count", lambda: (gc_control.IDLE_NEW_OBJECTS + 1, 0, 0))
    gc_control.tidy()
    assert looked
