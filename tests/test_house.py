"""House rules, checked on the source itself: who may import whom, what no module may do, scripts, ruff and mypy."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

TORCH_FREE = {"types", "assets", "text", "memory", "scheduling", "observe", "serve", "lang", "cluster", "simulation"}
LOWER = {"types", "assets", "text", "memory", "scheduling", "kernels", "model", "generation", "runtime"}
ALL = LOWER | {"engine", "observe", "serve", "lang", "cluster", "simulation", "bench", "cli"}

# Of the engine room, what servers know of it.
SERVED_BY = ("client", "frontend", "collector", "model_pool", "worker_client")

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
    "serve": {"types", "assets", "text", "observe", *(f"engine.{name}" for name in SERVED_BY)},
    "lang": {"types", "text", "engine.client", "engine.frontend", "engine.consensus"},
    "cluster": {"types", "engine.client", "engine.event_queue"},
    "simulation": {"types", "memory", "scheduling", "engine.core", "cluster"},
    "bench": ALL - {"cli"},
    "cli": ALL,
    "": ALL,  # the package's own __init__ and __main__
}

# Sub-folder → sub-folders of the same room it may import from, besides the modules at the room's root. In the room at
# large no circle runs through modules (see below); here, none through folders.
BESIDE: dict[str, set[str]] = {
    "generation.sampling": set(),
    "generation.drafting": set(),
    "generation.grammar": {"generation.grammar.json_schema"},
    "generation.grammar.json_schema": set(),
    "kernels.reference": set(),
    "kernels.eager": set(),
    "kernels.library": set(),
    "kernels.cpu": {"kernels.reference"},
    "kernels.triton": {"kernels.reference", "kernels.eager"},
    "runtime.tiers": set(),
    "runtime.connectors": {"runtime.tiers"},
    "runtime.executors": {"runtime.tiers", "runtime.connectors"},
    "bench.load": set(),
    "lang.adapters": set(),
}

# Within serve/: a neutral core, tools for HTTP over it, API families that know both and not each other, and the modules
# that put all of it together. Part → parts it may import from; a dotted name is one module with a rule of its own.
FAMILIES = {"openai", "anthropic", "ollama", "grpc", "ops"}
SERVE_MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "http": {"core"},
    **{family: {"core", "http"} for family in FAMILIES},
    "workers": {"core", "http"},
    **{f"http.{module}": FAMILIES | {"core", "http"} for module in ("app", "field_tables")},
    "http.server": FAMILIES | {"core", "http", "workers"},
    "workers.api_worker": {"core", "http", "workers"},
}

# What the offline engine may need on a machine that has little: everything else is imported where it is used.
ALWAYS_THERE = {"torch", "numpy", "msgspec", "tokenizers", "safetensors", "typer", "rich"}

# Where a package is not called what it is imported as, or comes with another; the longest prefix counts.
DISTRIBUTION = {
    "zmq": "pyzmq", "starlette": "fastapi", "grpc": "grpcio", "google": "protobuf",
    "msgspec.yaml": "pyyaml", "grpc_health": "grpcio_health_checking", "opentelemetry": "opentelemetry_sdk",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry_exporter_otlp_proto_http",
}  # fmt: skip

FOR_TESTS = {"dev", "clients", "site"}  # extras that the source itself does not need

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


def folder_of(name: str) -> str:
    """quire.serve.http.server → serve.http; modules at a room's root → the room."""
    return ".".join(modules()[name].parent.relative_to(SOURCE / "quire").parts) if name in modules() else room_of(name)


def may_import(name: str, target: str) -> bool:
    inside = name.removeprefix("quire").removeprefix(".")
    allowed = MAY_IMPORT.get(inside) or MAY_IMPORT[room_of(name)]
    wanted = target.removeprefix("quire.")
    return room_of(target) == room_of(name) or room_of(target) in allowed or wanted in allowed


@pytest.mark.parametrize("name", modules())
def test_rooms_import_only_what_lies_below(name: str) -> None:
    assert room_of(name) in MAY_IMPORT, f"{name}: no such room in the house"
    # The typing imports count too: to name a room's types is to know the room.
    inside = {target for target in imports(name, typing_too=True) if target.startswith("quire.")}
    strangers = {target for target in inside if not may_import(name, target)}
    assert not strangers, f"{name} must not import {sorted(strangers)}"
    beside = BESIDE.get(folder_of(name))
    if beside is not None:
        folders = {folder_of(target) for target in inside if room_of(target) == room_of(name)}
        wrong = {folder for folder in folders if "." in folder} - beside - {folder_of(name)}
        assert not wrong, f"{name} must not import from {sorted(wrong)}"


def test_rooms_and_folders_named_here_are_those_there_are() -> None:
    assert set(MAY_IMPORT) - {""} == {room_of(name) for name in modules() if room_of(name)} | {"engine.build"}
    folders = {folder_of(name) for name in modules()}
    assert BESIDE.keys() | set().union(*BESIDE.values()) <= folders
    for room in {room_of(folder) for folder in BESIDE}:
        assert {folder for folder in folders if folder.startswith(f"{room}.")} <= BESIDE.keys(), room


def test_every_folder_introduces_itself() -> None:
    for folder in {path.parent for path in SOURCE.rglob("*.py")}:
        assert (folder / "__init__.py").is_file(), f"{folder.relative_to(ROOT)} has no __init__.py"  # with a docstring:
        # test_modules_introduce_themselves_and_run_no_strangers_code


def test_no_two_modules_have_the_same_file_name() -> None:
    names: dict[str, list[str]] = {}
    for name, path in modules().items():
        names.setdefault(path.name, []).append(name)
    assert not {file: found for file, found in names.items() if len(found) > 1 and file != "__init__.py"}


@pytest.mark.parametrize("name", [name for name in modules() if name.startswith("quire.serve.")])
def test_serving_is_a_neutral_core_under_families_that_do_not_know_each_other(name: str) -> None:
    inside = name.removeprefix("quire.serve.")
    part = inside.split(".")[0]
    allowed = SERVE_MAY_IMPORT.get(inside) or SERVE_MAY_IMPORT[part]
    for target in imports(name, typing_too=True):
        wanted = target.removeprefix("quire.serve.")
        if wanted != target and wanted.split(".")[0] != part:
            assert wanted.split(".")[0] in allowed, f"{name} must not import {target}"
        # What puts everything together is nobody's tool.
        assert wanted not in SERVE_MAY_IMPORT or "." not in wanted or inside in SERVE_MAY_IMPORT, f"{name}: {target}"


def test_no_module_cycles() -> None:
    """Typing imports count: two modules that name each other's types know each other."""
    graph = {name: imports(name, typing_too=True) & modules().keys() - {name} for name in modules()}
    circles = strongly_connected(graph)
    assert not circles, "\n".join(" ↔ ".join(sorted(circle)) for circle in circles)


def strongly_connected(graph: Mapping[str, Set[str]]) -> list[set[str]]:
    """Sets of two or more nodes that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, left = set[str](), [start]
        while left:
            new = graph[left.pop()] - seen
            seen |= new
            left += new
        reached[start] = seen
    found = {frozenset({b for b in reached[a] if a in reached[b]}) for a in graph}
    return sorted((set(circle) for circle in found if circle), key=sorted)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{code}"]
    return subprocess.run(command, capture_output=True, text=True)


# Modules for people who have a package that no other part needs; the slow suite has them all.
ADAPTERS = {"quire.lang.adapters.dspy": "dspy", "quire.lang.adapters.langchain": "langchain_core"}


def test_control_rooms_load_without_torch() -> None:
    names = [name for name in modules() if room_of(name) in TORCH_FREE] + [
        "quire.engine.client",
        "quire.engine.frontend",
        "quire.engine.open_pool",
    ]
    names = [name for name in names if name not in ADAPTERS or find_spec(ADAPTERS[name])]
    done = run_python(f"sys.modules['torch'] = None\nfor name in {names!r}: __import__(name)")
    assert done.returncode == 0, done.stderr


@cache
def outside_imports() -> frozenset[str]:
    """Modules of others that the source names."""
    found = {target for name in modules() for target in imports(name)}
    return frozenset(t for t in found if t.split(".")[0] not in sys.stdlib_module_names | {"quire"})


def distribution(target: str) -> str:
    """opentelemetry.sdk.trace → opentelemetry_sdk"""
    parts = target.split(".")
    prefixes = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((DISTRIBUTION[prefix] for prefix in prefixes if prefix in DISTRIBUTION), parts[0])


def requirements(lines: Iterable[str]) -> set[str]:
    """Names of the packages, our own extras left out."""
    return {re.split(r"[^\w-]", line)[0].replace("-", "_").lower() for line in lines} - {"quire"}


def test_offline_engine_loads_with_few_packages() -> None:
    packages = {target.split(".")[0] for target in outside_imports()}
    block = "".join(f"sys.modules[{name!r}] = None\n" for name in sorted(packages - ALWAYS_THERE))
    done = run_python(f"{block}from quire import LLM, SamplingParams\nimport quire.cli, quire.engine.build")
    assert done.returncode == 0, done.stderr


def test_dependencies_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {k: requirements(v) for k, v in project["optional-dependencies"].items() if k not in FOR_TESTS}
    imported = {distribution(target) for target in outside_imports()}
    assert imported <= requirements(project["dependencies"]).union(*extras.values())
    idle = {name: lines - imported for name, lines in extras.items() if lines - imported}
    assert not idle, f"extras that nothing in src imports: {idle}"


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


SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))


def names_of(module: str) -> set[str]:
    """What a module defines or imports at its top level, and its submodules."""
    inside = {name.removeprefix(f"{module}.") for name in modules() if name.startswith(f"{module}.")}
    found = {name for name in inside if "." not in name} | {"__file__"}
    left: list[ast.AST] = [tree_of(module)]
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        left += ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_use_only_names_that_exist(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{path.name} has no docstring"
    bound: dict[str, str] = {}  # names in the script → modules of the package
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "quire":
                    assert alias.name in modules(), f"{path.name}:{node.lineno}: no module {alias.name}"
                    bound |= {alias.asname: alias.name} if alias.asname else {}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "quire":
            assert node.module in modules(), f"{path.name}:{node.lineno}: no module {node.module}"
            missing = {alias.name for alias in node.names} - names_of(str(node.module))
            assert not missing, f"{path.name}:{node.lineno}: {node.module} has no {sorted(missing)}"
            wholes = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            bound |= {name: whole for name, whole in wholes.items() if whole in modules()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
            module = bound[node.value.id]
            assert node.attr in names_of(module), f"{path.name}:{node.lineno}: {module} has no {node.attr}"


RUFF = ["ruff", "check", "src", "tests", "scripts", "examples"]


@pytest.mark.parametrize("arguments", [RUFF, ["mypy"]], ids=["ruff", "mypy"])
def test_checkers_are_content(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
