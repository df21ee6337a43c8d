"""House rules, checked on the source itself: who may import whom, what no module may do, ruff and mypy."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

TORCH_FREE = {"types", "assets", "text", "memory", "scheduling", "observe", "serve", "lang"}
LOWER = {"types", "assets", "text", "memory", "scheduling", "kernels", "model", "generation", "runtime"}
ALL = LOWER | {"engine", "observe", "cluster", "serve", "lang", "bench", "cli"}

# Room → rooms it may import from (besides itself); a dotted name allows one module only.
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "assets": {"types"},
    "text": {"types", "assets"},
    "memory": {"types"},
    "scheduling": {"types", "memory"},
    "kernels": {"types"},
    "model": {"types", "assets", "kernels"},
    "generation": {"types", "kernels", "model"},
    "runtime": {"types", "assets", "kernels", "model", "generation"},
    "engine": LOWER - {"runtime"},
    "engine.build": LOWER,
    "observe": {"types"},
    "cluster": {"types", "engine"},
    "serve": {"types", "text", "observe", "engine.client", "engine.frontend"},
    "lang": {"types", "text", "engine.client", "engine.frontend", "engine.consensus"},
    "bench": ALL - {"cli"},
    "cli": ALL,
    "": ALL,  # the package's own __init__ and __main__
}

# What the offline engine may need on a machine that has little: everything else is imported where it is used.
ALWAYS_THERE = {"torch", "numpy", "msgspec", "tokenizers", "safetensors", "typer", "rich"}

# Where a package is not called what it is imported as, or comes with another.
DISTRIBUTION = {
    "zmq": "pyzmq", "starlette": "fastapi", "flashinfer": "flashinfer_python", "grpc": "grpcio", "google": "protobuf",
    "grpc_health": "grpcio_health_checking", "opentelemetry": "opentelemetry_sdk",
}  # fmt: skip

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}


@cache
def modules() -> dict[str, Path]:
    """Dotted name → file, for every module of the package."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def nodes(tree: ast.AST, typing_too: bool = False) -> Iterator[ast.AST]:
    """All nodes, leaving out what only type checkers read."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test) and not typing_too:
            for rest in child.orelse:
                yield from nodes(rest)
            continue
        yield child
        yield from nodes(child, typing_too)


def imports(name: str, typing_too: bool = False) -> set[str]:
    """Dotted names a module imports, wherever in it; `from a import b` counts as a.b where that is a module."""
    found: set[str] = set()
    for node in nodes(tree_of(name), typing_too):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute here"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules() else str(node.module))
    return found


def room_of(name: str) -> str:
    """quire.serve.http.server → serve; the package's own __init__ and __main__ → ''."""
    return name.removeprefix("quire").removeprefix(".").removesuffix("__main__").split(".")[0]


def may_import(name: str, target: str) -> bool:
    inside = name.removeprefix("quire").removeprefix(".")
    allowed = MAY_IMPORT.get(inside) or MAY_IMPORT[room_of(name)]
    wanted = target.removeprefix("quire.")
    return room_of(target) == room_of(name) or room_of(target) in allowed or wanted in allowed


@pytest.mark.parametrize("name", modules())
def test_rooms_import_only_what_lies_below(name: str) -> None:
    assert room_of(name) in MAY_IMPORT, f"{name}: no such room in the house"
    # The typing imports count too: to name a room's types is to know the room.
    strangers = {
        target
        for target in imports(name, typing_too=True)
        if target.startswith("quire.") and not may_import(name, target)
    }
    assert not strangers, f"{name} must not import {sorted(strangers)}"


def test_no_module_cycles() -> None:
    graph = {name: {target for target in imports(name) if target in modules()} - {name} for name in modules()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " → ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{code}"]
    return subprocess.run(command, capture_output=True, text=True)


# Modules for people who have a package that no other part needs; the slow suite has them all.
ADAPTERS = {"quire.lang.adapters.dspy": "dspy", "quire.lang.adapters.langchain": "langchain_core"}


def test_control_rooms_load_without_torch() -> None:
    names = [name for name in modules() if room_of(name) in TORCH_FREE] + [
        "quire.engine.client",
        "quire.engine.frontend",
    ]
    names = [name for name in names if name not in ADAPTERS or find_spec(ADAPTERS[name])]
    done = run_python(f"sys.modules['torch'] = None\nfor name in {names!r}: __import__(name)")
    assert done.returncode == 0, done.stderr


def outside_imports() -> set[str]:
    """Packages of others that the source names."""
    found = {target.split(".")[0] for name in modules() for target in imports(name)}
    return found - {"quire"} - sys.stdlib_module_names


def test_offline_engine_loads_with_few_packages() -> None:
    block = "".join(f"sys.modules[{name!r}] = None\n" for name in sorted(outside_imports() - ALWAYS_THERE))
    done = run_python(f"{block}from quire import LLM, SamplingParams\nimport quire.cli, quire.engine.build")
    assert done.returncode == 0, done.stderr


def test_dependencies_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for name, lines in project["optional-dependencies"].items() if name != "dev" for line in lines]
    declared = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in project["dependencies"] + extras}
    assert {DISTRIBUTION.get(name, name) for name in outside_imports()} <= declared


@pytest.mark.parametrize("name", modules())
def test_modules_introduce_themselves_and_run_no_strangers_code(name: str) -> None:
    tree = tree_of(name)
    assert ast.get_docstring(tree), f"{name} has no docstring"
    assert not {target.split(".")[0] for target in imports(name)} & FORBIDDEN_MODULES
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "compile", "torch.load", "os.system"}, f"{name}: {called}()"
            shell = [word for word in node.keywords if word.arg in ("shell", "trust_remote_code")]
            assert not shell, f"{name}: {called}({shell[0].arg}=...)"


def test_public_names() -> None:
    import quire

    params = {"BeamParams", "BlendParams", "GrammarSpec", "SamplingParams"}
    assert set(quire.__all__) == {"LLM", "AsyncLLM", "__version__"} | params
    for name in quire.__all__:
        assert getattr(quire, name) is not None


@pytest.mark.parametrize("arguments", [["ruff", "check", "src", "tests"], ["mypy"]], ids=["ruff", "mypy"])
def test_checkers_are_content(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
