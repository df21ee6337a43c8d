"""Every script of examples/ runs on the default model and prints what it is about."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = {path.name: path for path in sorted((ROOT / "examples").glob("*.py"))}
SERVED = {"agent.py", "streaming.py"}  # those that are told a server's address
PRINTS = {
    "agent.py": r"^weather\((Paris|Oslo|Lima)\) = \d+ degrees\n(?s:.*)^[1-9]\d* of \d+ prompt tokens of the last turn",
    "batch.py": r"^France: .*Paris(?s:.*)^8 answers, [1-9]\d* tokens",
    "chat.py": r"^[1-9]\d* tokens of the second prompt were in the prefix cache",
    "extraction.py": r"^.{1,30}: (kettle|toaster|lamp), (broken|fine), \d+\n.{1,30}: (kettle|toaster|lamp), ",
    "rag.py": r"^0 tokens reused at another place\n(?s:.*)^[1-9]\d* tokens reused at another place",
    "streaming.py": r"\w+(?s:.*)^[1-9]\d* tokens$",
}


def test_every_example_is_listed_and_tested() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    assert EXAMPLES.keys() == PRINTS.keys() == set(re.findall(r"\((\w+\.py)\)", page))


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
