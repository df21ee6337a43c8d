"""docs/models.md tells what the registry knows and what tests have found."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from test_family_engine import FAMILIES, MORE
from test_gguf_models import GGUF_FAMILIES, GGUF_HYBRIDS
from tiny_models import CONFIGS

ROOT = Path(__file__).parents[2]


def test_the_page_is_current():
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "scripts/models_page.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert (ROOT / "docs/models.md").read_text() == made.page(), "run scripts/models_page.py docs/models.md"


FOUND = json.loads((ROOT / "docs/models.json").read_text())["models"]
ENGINE = ("alone", "batched", "chunked", "preempted", "prefix_hit", "two_engines", "speculation")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_is_in_the_table(name):
    """With all columns that tests have for it, each passed; run scripts/model_table.py docs/models.json."""
    columns = {
        "logits",
        *(ENGINE if name in (*FAMILIES, *MORE) else ()),
        *(("gguf",) if name in (*GGUF_FAMILIES, *GGUF_HYBRIDS) else ()),
    }
    assert {column: FOUND[name].get(column) for column in columns} == dict.fromkeys(columns, "passed")
