"""Every script of examples/ runs on the default model and prints what it is about, and so does the notebook."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = {path.name: path for path in sorted((ROOT / "examples").glob("*.py"))}
SERVED = {"agent.py", "streaming.py"}  # those that are told a server's address
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
CELLS = [  # what those with code print
    r"^$", r"^The capital of France is Paris", r"\w+ \w+", r"^\['city', 'people'\]$", r"^[1-9]\d* tokens of the prompt",
    r"^4 answers$",
]  # fmt: skip
PRINTS = {
    "agent.py": r"^weather\((Paris|Oslo|Lima)\) = \d+ degrees\n(?s:.*)^[1-9]\d* of \d+ prompt tokens of the last turn",
    "batch.py": r"^France: .*Paris(?s:.*)^8 answers, [1-9]\d* tokens",
    "chat.py": r"^[1-9]\d* tokens of the second prompt were in the prefix cache",
    "extraction.py": r"^.{1,30}: (kettle|toaster|lamp), (broken|fine), \d+\n.{1,30}: (kettle|toaster|lamp), ",
    "rag.py": r"^\d+ tokens reused at another place\n(?s:.*)^[1-9]\d* tokens reused at another place",
    "streaming.py": r"\w+(?s:.*)^[1-9]\d* tokens$",
}


def test_every_example_is_listed_and_tested() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    assert EXAMPLES.keys() == PRINTS.keys() == set(re.findall(r"\((\w+\.py)\)", page))
    assert {path.name for path in (ROOT / "examples").glob("*.ipynb")} == {NOTEBOOK.name}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, request: pytest.FixtureRequest) -> None:
    address = [str(request.getfixturevalue("live_server"))] if name in SERVED else []
    request.getfixturevalue("default_model")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES[name]), *address], capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTS[name], done.stdout, re.MULTILINE), done.stdout


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel(default_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="`make test-all` installs nbclient and ipykernel")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=240).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell, wanted in zip(cells, CELLS, strict=True):
        assert re.search(wanted, "".join(map(shown, cell.outputs)).strip(), re.MULTILINE), (cell.source, cell.outputs)


def shown(output: Any) -> str:
    """What a cell wrote to standard output, or the value of its last line."""
    return output.text if output.get("name") == "stdout" else output.get("data", {}).get("text/plain", "")
