"""Runs the tests that compare models with transformers, and writes down what each found: docs/models.json, which
scripts/models_page.py makes a table of. Some 20 minutes on two cores; on a machine with a GPU, its column too.

PYTHONPATH=src python scripts/model_table.py docs/models.json [-k EXPRESSION]      others keep what was found before
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from quire.model.compiled import unknown_to_program
from quire.model.families.registry import read_spec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/model"))
ENGINE = ("alone", "batched", "chunked", "preempted", "prefix_hit", "two_engines", "speculation")
# Test → columns. What stands in its brackets is a configuration of tests/model/tiny_models.py.
TESTS = {
    "test_families.py::test_logits_match_transformers": ("logits",),
    **{f"test_family_engine.py::test_{column}": (column,) for column in ENGINE},
    "test_gguf_models.py::test_logits_survive_conversion": ("gguf",),
    "test_families.py::test_on_a_gpu": ("gpu",),
}
# ... or, of those without a vocabulary's head, a maker of tests/engine/tiny_encoders.py, or a family.
POOLED = {
    "test_encoders.py::test_embeddings_are_pooled_as_files_say": ("{}Model", ("logits", "alone", "batched")),
    "test_encoders.py::test_pairs_are_scored_by_the_head": ("{}ForSequenceClassification", ("logits", "batched")),
    "test_encoders.py::test_decoders_with_a_classification_head": (
        "{}ForSequenceClassification",
        ("logits", "batched", "chunked", "prefix_hit"),
    ),
}
CLASSES = {"bert": "Bert", "xlm_roberta": "XLMRoberta"}


class Config:
    """A configuration as if it were files."""

    def __init__(self, config: dict[str, Any]):
        self._config = config

    def metadata(self) -> dict[str, Any]:
        return self._config

    def tensors(self) -> dict[str, Any]:
        return {}


class Recorder:
    """Test outcomes by configuration and column; of several tests of one, the worst."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        match = re.fullmatch(r"tests/\w+/(\w+\.py::\w+)\[(.+)\]", report.nodeid)
        if match is None or report.skipped or (report.when != "call" and report.passed):
            return
        test, name = match.groups()
        if test in POOLED:
            pattern, columns = POOLED[test]
            name = name.split("-")[-1]
            name = pattern.format(CLASSES.get(name, name))
        else:
            columns = TESTS.get(test, ())
        for column in columns:
            row = self.found.setdefault(name, {})
            row[column] = "failed" if report.failed or row.get(column) == "failed" else "passed"


def described(name: str) -> dict[str, str]:
    """Of a configuration: its class, and what runs that on a CPU at ordinary sizes; those here are odd."""
    from tiny_models import CONFIGS

    if name not in CONFIGS:
        return {"architecture": name}
    config = CONFIGS[name]()
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    spec = read_spec(Config({**json.loads(config.to_json_string()), "architectures": [architecture]}))  # type: ignore[arg-type]
    why_not = unknown_to_program(spec)
    compiled = why_not is None or why_not.endswith("no multiple of 32")
    return {"architecture": architecture, "cpu": "compiled" if compiled else "torch"}


def main(target: Path, more: list[str]) -> int:
    recorder = Recorder()
    files = [f"tests/{where}" for where in ("model", "engine/test_encoders.py")]
    names = " or ".join(sorted({test.split("::")[1] for test in (*TESTS, *POOLED)}))
    if more[:1] == ["-k"]:
        names, more = f"({names}) and ({more[1]})", more[2:]
    options = ["-q", "-p", "no:cacheprovider", "-m", "slow or not slow", "-k", names]
    status = pytest.main([*options, *more, *files], plugins=[recorder])
    before = json.loads(target.read_text())["models"] if target.exists() else {}
    found = {name: before.get(name, {}) | recorder.found.get(name, {}) for name in before.keys() | recorder.found}
    rows = {name: found[name] | described(name) for name in sorted(found)}
    target.write_text(json.dumps({"transformers": transformers.__version__, "models": rows}, indent=1) + "\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2:]))
