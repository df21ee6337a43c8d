"""docs/models.md tells what the registry knows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_current():
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "scripts/models_page.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert (ROOT / "docs/models.md").read_text() == made.page(), "run scripts/models_page.py docs/models.md"
