"""What docs/python.md shows runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
PRINTS = [r"Paris(?s:.*)Gravity", r"Paris(?s:.*)Rome(?s:.*)too slow"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets_run(number: int, default_model: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SNIPPETS[number]],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTS[number], done.stdout), done.stdout


def test_progress_is_told_while_requests_run(default_model: Any, monkeypatch: Any, capsys: Any) -> None:
    from quire import LLM, SamplingParams

    monkeypatch.setattr("quire.engine.request_progress.INTERVAL_S", 0.0)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, n=2)
    with LLM("smollm2-135m", kv_memory="64M", max_model_len=512) as llm:
        llm.generate(["one", "two"], params)
        assert "requests" not in capsys.readouterr().err
        llm.generate(["one", "two"], params, progress=True)
        told = capsys.readouterr().err
    assert "0/2 requests" in told and "output tok/s" in told and told.endswith("\r")
