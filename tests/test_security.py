"""What SECURITY.md promises of the code itself: nothing runs or fetches what strangers send.

Looks at the syntax tree of every module, and at everything that is imported when a server and an engine are.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "src" / "quire").rglob("*.py"))

# Modules that turn bytes into code or objects of any kind.
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "code"}
UNSAFE_CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "torch.hub.load", "torch.jit.load", "np.load", "numpy.load",
    "os.system", "os.popen", "jinja2.Environment", "jinja2.Template", "Environment", "Template",
}  # fmt: skip
SAFE_PATH = {"'-P'", "'-I'"}
UNSAFE_WORDS = {"shell", "trust_remote_code", "allow_pickle"}
# Whatever can follow a URL. Models are fetched by name, from the hub, by assets; the load generator has a URL to load,
# and a program in quire.lang is told by its author which server runs it.
FETCHERS = {"urllib.request", "http.client", "requests", "httpx", "aiohttp", "urllib3", "huggingface_hub", "ftplib"}
MAY_FETCH = {"assets", "bench", "cli", "lang"}


UNWANTED = {"requests", "httpx", "aiohttp", "huggingface_hub", "torch", "dill", "cloudpickle"}


def imported(tree: ast.AST) -> set[str]:
    """Dotted names of all imports, wherever they stand; `from a import b` counts as both a and a.b."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return found


def faults(source: str, room: str = "serve") -> list[str]:
    """Everything in a module that SECURITY.md rules out."""
    tree = ast.parse(source)
    names = imported(tree)
    found = [name for name in names if name.split(".")[0] in UNSAFE_MODULES]
    if room not in MAY_FETCH:
        found += [name for name in names if name in FETCHERS or name.split(".")[0] in FETCHERS]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in UNSAFE_CALLS:
                found.append(f"{called}()")
            words = [word for word in node.keywords if word.arg in UNSAFE_WORDS]
            found += [f"{called}({word.arg}=...)" for word in words if ast.unparse(word.value) != "False"]
        elif isinstance(node, ast.List):
            match [ast.unparse(word) for word in node.elts[:2]]:
                case ["sys.executable", *rest] if not SAFE_PATH.issuperset(rest):
                    found.append(f"{ast.unparse(node)} imports from the current folder, which may be a checkpoint")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_no_module_runs_or_fetches_what_strangers_send(path: Path) -> None:
    relative = path.relative_to(ROOT / "src" / "quire")
    assert not faults(path.read_text(encoding="utf-8"), relative.parts[0])


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import torch\ntorch.load(path)",
        "eval(text)",
        "exec(text)",
        "import jinja2\njinja2.Environment()",
        "from jinja2 import Template\nTemplate(text)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "np.load(path, allow_pickle=flag)",
        "subprocess.run(command, shell=True)",
        "import httpx",
        "from urllib.request import urlopen",
        "import yaml",
        "run([sys.executable, '-m', 'quire'])",
    ],
)
def test_the_test_finds_what_it_looks_for(source: str) -> None:
    assert faults(source)


def test_templates_are_rendered_in_the_sandbox_alone() -> None:
    users = [path.name for path in MODULES if re.search(r"^\s*(from|import) jinja2", path.read_text(), re.MULTILINE)]
    assert users and set(users) <= {"sandbox.py", "template.py", "template_tools.py"}
    sandbox = (ROOT / "src/quire/text/sandbox.py").read_text()
    assert re.search(r"^class \w+\(ImmutableSandboxedEnvironment\)", sandbox, re.MULTILINE)


def test_a_server_loads_no_client_for_urls() -> None:
    """Not even through somebody else's module: what a running API process has imported."""
    code = (
        "import sys; import quire.serve, quire.cli.serve, quire.engine.client\n"
        f"print(*sorted({UNWANTED!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "src")}
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
