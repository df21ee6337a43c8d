"""The site that mkdocs builds from docs/: no warnings, every page, nothing loaded from elsewhere."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
inside = runpy.run_path(str(ROOT / "scripts" / "site_links.py"))["inside"]


def test_links_of_pages_become_links_of_the_site() -> None:
    assert inside("[docs/api.md](docs/api.md#fields)", ROOT) == "[api.md](api.md#fields)"
    assert inside("see [README](../README.md#models)", ROOT / "docs") == "see [README](index.md#models)"
    assert inside("in [`deploy/`](../deploy/) and [x](http://y/z)", ROOT / "docs") == "in `deploy/` and [x](http://y/z)"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("material") is None, reason="mkdocs-material is not installed: pip install -e '.[site]'")
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    built = {page.stem for page in tmp_path.glob("*.html")}
    assert built == {page.stem for page in (ROOT / "docs").glob("*.md")} | {"index", "404"}
    for page in tmp_path.glob("*.html"):
        loaded = re.findall(r"<(?:script|img|link)[^>]*(?:src|href)=\"?(https?:[^\s\">]+)", page.read_text())
        assert not loaded, f"{page.name} loads {loaded}"
