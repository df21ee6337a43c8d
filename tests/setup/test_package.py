"""The package as others get it: its version, what it says was tested, and (slow) all files in the wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import quire

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_changelog_begins_with_this_version():
    assert re.search(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == quire.__version__


def test_the_version_is_kept_in_one_place():
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]


def test_what_was_tested_is_what_may_be_installed():
    page = (ROOT / "docs/tested-versions.md").read_text()
    rows = re.findall(r"^\| (\d[\d.]*)[^|]*\| (\d[\d.]*) \|", page, re.MULTILINE)
    lines = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    least = dict(re.findall(r"^(torch|triton)>=([\d.]+)", "\n".join(lines), re.MULTILINE))
    assert rows
    for torch, triton in rows:
        assert release(torch) >= release(least["torch"]) and release(triton) >= release(least["triton"])


@pytest.mark.slow
def test_a_wheel_for_all_pythons_has_every_file(tmp_path):
    tree = tmp_path / "tree"  # a copy: what an earlier build left behind is not to be found
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=tree, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"quire-{quire.__version__}-cp311-abi3-")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("quire/")}
    there = {str(path.relative_to(tree / "src")) for path in (tree / "src/quire").rglob("*") if path.is_file()}
    wanted = {name for name in there if "/csrc/" not in name}  # compiled
    assert packed == wanted | {"quire/kernels/cpu/_native.abi3.so"} and "quire/py.typed" in packed
