"""All that set-up installs, resolved by uv from the plain index for every machine and Python that Quire is for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# glibc 2.31 (2020) is what llguidance's wheels ask for; a Mac's is what uv takes when not told: macOS 13.
PLATFORMS = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31", "aarch64-apple-darwin")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def uv() -> str:
    """The one beside this Python, which `make test-all` installs, or any on the path."""
    found = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if found is None:
        pytest.skip("uv is not installed; `make test-all` installs it")
    return found


def environment() -> dict[str, str]:
    """No settings of this machine, but its certificates and proxies: they are how an index is reached at all."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}


def compile_requirements(*words: str) -> str:
    command = [uv(), "pip", "compile", *words, "--no-config", "--no-python-downloads", "--only-binary", ":all:"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    if done.returncode and re.search(r"dns error|error sending request|Failed to fetch|timed out", done.stderr):
        pytest.skip(f"no index answers: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def versions(resolved: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", resolved, re.MULTILINE))


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_everything_resolves_together(python, platform):
    words = ("--extra", "dev", "--extra", "clients", "--extra", "cuda", "--python-version", python)
    found = versions(compile_requirements("pyproject.toml", *words, "--python-platform", platform))
    assert "torch" in found
    assert ("triton" in found) == ("manylinux" in platform)


@pytest.mark.parametrize("platform", PLATFORMS[:2])
def test_the_lowest_torch_and_triton_fit_together(platform):
    """torch names its triton exactly: the lower bounds are a pair, too."""
    words = ("--resolution", "lowest-direct", "--extra", "dev", "--python-version", "3.12")
    found = versions(compile_requirements("pyproject.toml", *words, "--python-platform", platform))
    declared = (ROOT / "pyproject.toml").read_text()
    for name in ("torch", "triton"):
        least = ".".join(found[name].split(".")[:2])
        assert re.search(rf'"{name}>={re.escape(least)}\b', declared), f"the lowest that resolves is {found[name]}"
