"""Which build of torch set-up installs: the choice for each kind of machine, with indexes and pip replaced."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
import zipfile
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("install_torch", ROOT / "scripts/install_torch.py")
assert spec and spec.loader
script = sys.modules["install_torch"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

Machine, Wheel = script.Machine, script.Wheel

LOCAL = Wheel("2.12.0+cpu", "/wheels", 155)
REMOTE = Wheel("2.14.0+cpu", script.CPU_INDEX, None)
PLAIN = ("torch>=2.11",)
OWN = ("torch==2.12.0+cpu",)
CPU = ("--extra-index-url", script.CPU_INDEX, "torch==2.14.0+cpu")

BARE, GPU, MAC = Machine("Linux", False, None), Machine("Linux", True, None), Machine("Darwin", False, None)
MIRROR = ("--index-url=https://mirror/simple",)

CASES = {
    # machine, wheel in a folder, wheel on PyTorch's CPU index → words for pip, said
    "cpu, a wheel in a folder": (BARE, LOCAL, REMOTE, OWN, "155 MB .* in /wheels: .* no NVIDIA"),
    "cpu, PyTorch's index": (BARE, None, REMOTE, CPU, "CPU build .* about 200 MB .* no NVIDIA"),
    "cpu, no CPU wheels": (BARE, None, None, PLAIN, "3000 MB .* no NVIDIA .*--find-links"),
    "gpu": (GPU, LOCAL, REMOTE, PLAIN, "CUDA .* 3000 MB .* is an NVIDIA GPU"),
    "gpu, cpu asked": (replace(GPU, asked="cpu"), None, REMOTE, CPU, "CPU build .* as asked"),
    "cpu, cuda asked": (replace(BARE, asked="cuda"), LOCAL, REMOTE, PLAIN, "CUDA .* as asked"),
    "mac": (MAC, LOCAL, REMOTE, PLAIN, "90 MB: on macOS"),
    "kept": (replace(GPU, installed="2.11.0+cpu"), LOCAL, REMOTE, (), "2.11.0.cpu is installed .* kept"),
    "kept, a later one": (replace(MAC, installed="3.0.1"), None, None, (), "kept"),
    "too old": (replace(BARE, installed="2.9.1"), None, REMOTE, CPU, "CPU build"),
    "an index of one's own": (replace(GPU, pip_args=MIRROR), LOCAL, REMOTE, PLAIN, "PIP_ARGS names"),
    "a folder of one's own": (replace(BARE, pip_args=("-f", "/wheels")), LOCAL, REMOTE, OWN, "in /wheels"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_choice(case):
    machine, local, remote, install, said = CASES[case]
    choice = script.choose(machine, "torch>=2.11", lambda: local, lambda: remote)
    assert choice.install == install
    assert re.search(said, choice.said), choice.said


@pytest.mark.parametrize("machine", [GPU, MAC, replace(BARE, installed="2.11")])
def test_nothing_is_asked_that_the_choice_does_not_need(machine):
    def fail():
        pytest.fail("a wheel was looked for")

    script.choose(machine, "torch>=2.11", fail, fail)


PAGE = """<!DOCTYPE html><body>
<a href="/whl/cpu/torch-2.9.1%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl#sha256=00">too old</a>
<a href="/whl/cpu/torch-2.11.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl#sha256=01" data-dist-info-metadata="x">a</a>
<a href="https://other.example/torch-2.12.1%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl#sha256=02">the newest</a>
<a href="/whl/cpu/torch-2.12.0%2Bcpu-cp311-cp311-manylinux_2_28_aarch64.whl">another architecture</a>
<a href="/whl/cpu/torch-2.13.0%2Bcpu-cp312-cp312-manylinux_2_28_x86_64.whl">another Python</a>
<a href="/whl/cpu/torch-2.13.0%2Bcpu-cp311-cp311t-manylinux_2_28_x86_64.whl">another ABI</a>
<a href="/whl/cpu/torch-2.13.0-cp311-none-macosx_14_0_arm64.whl">a Mac's</a>
<a href="/whl/cpu/torchvision-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl">another package</a>
"""


def test_the_newest_wheel_of_a_page():
    def found(*words):
        return script.newest(PAGE, f"{script.CPU_INDEX}/torch/", "2.11", *words)

    x86 = "https://other.example/torch-2.12.1%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    arm = f"{script.CPU_INDEX}/torch-2.12.0%2Bcpu-cp311-cp311-manylinux_2_28_aarch64.whl"
    assert found("cp311", "x86_64") == ("2.12.1+cpu", x86)
    assert found("cp311", "aarch64") == ("2.12.0+cpu", arm)
    assert found("cp314", "x86_64") is None


def test_an_index_that_does_not_answer_is_no_error(monkeypatch):
    monkeypatch.setattr(script, "CPU_INDEX", "http://127.0.0.1:1")
    assert script.cpu_wheel("2.11") is None


def test_a_wheel_in_a_folder_is_found_as_pip_finds_it(tmp_path, monkeypatch):
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert script.local_wheel("torch>=2.11", ()) is None
    make_wheel(tmp_path, "2.12.0+cpu")
    make_wheel(tmp_path, "2.10.0+cpu")
    assert script.local_wheel("torch>=2.11", ("--find-links", str(tmp_path))).version == "2.12.0+cpu"
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert script.local_wheel("torch>=2.11", ()).version == "2.12.0+cpu"
    assert script.local_wheel("torch>=2.13", ()) is None


def make_wheel(folder: Path, version: str) -> None:
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_torch_and_triton_have_lower_bounds_only():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = chain(project["dependencies"], *project["optional-dependencies"].values())
    bounds = [line.partition(";")[0].strip() for line in lines if re.match(r"torch|triton", line)]
    assert bounds and all(re.fullmatch(r"(torch|triton)>=[\d.]+", bound) for bound in bounds)
    assert script.torch_requirement() in bounds
