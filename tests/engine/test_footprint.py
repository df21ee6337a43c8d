"""What starting up needed is given back, and what is used again comes back."""

import subprocess
import sys

import pytest

PROGRAM = """
import re, torch
from quire.engine.footprint import shed
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
