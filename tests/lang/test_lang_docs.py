"""The tutorial's snippets, run in their order; what a line is said to print, it prints."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "lang.md").read_text(encoding="utf-8")
TUTORIAL, ADAPTERS = PAGE.split("## Adapters")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PRINTS = re.compile(r"# -> (.*)$", re.MULTILINE)


def run(page, url, names):
    blocks = BLOCK.findall(page)
    assert blocks
    for block in blocks:
        with redirect_stdout(StringIO()) as out:
            exec(compile(block.replace("http://127.0.0.1:8000", str(url)), "docs/lang.md", "exec"), names)
        said = out.getvalue().splitlines()
        assert [line.strip() for line in said] == PRINTS.findall(block), block


@pytest.mark.slow
def test_the_tutorial(live_server):
    names = {"__name__": "tutorial"}
    try:
        run(TUTORIAL, live_server, names)
    finally:
        for name in ("model", "server"):
            if name in names:
                names[name].close()


@pytest.mark.slow
def test_the_adapters(live_server, model):
    names = {"__name__": "adapters", "model": model}
    run(ADAPTERS, live_server, names)
