"""A disk that is full, a real one: a tmpfs of 4 MiB in a mount namespace of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("full_disk_cases.py")
MOUNT = 'mount -t tmpfs -o size=4m tmpfs "$0" && exec "$@"'


@cache
def mountable() -> bool:
    """Whether this user may mount in a namespace of its own."""
    command = ["unshare", "-Urm", "sh", "-c", MOUNT, "/mnt", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    "case", ["files", "downloads", *(pytest.param(c, marks=pytest.mark.slow) for c in ("batches", "messages", "pages"))]
)
def test_nothing_is_lost_on_a_full_disk(case: str, tmp_path: Path) -> None:
    if not mountable():
        pytest.skip("mounting needs user namespaces")
    command = ["unshare", "-Urm", "sh", "-c", MOUNT, str(tmp_path), sys.executable, str(CASES), case, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith('"well"\n'), done.stdout + done.stderr
