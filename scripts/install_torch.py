"""Installs the build of torch that fits this machine into the environment of the Python that runs this.

    no NVIDIA GPU ─► a wheel that pip's settings find (find-links) ─► PyTorch's index of CPU wheels ─► the plain index
    an NVIDIA GPU, or macOS ─► the plain index: CUDA builds for Linux, CPU and Metal for a Mac

The plain index has CUDA builds only for Linux, with gigabytes of libraries that a machine without a GPU never loads.
Run by `make setup` before Quire itself is installed, which then finds its torch there and leaves it. Standard library
only: nothing else is installed yet.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urljoin, urlparse

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PATIENCE = 5  # seconds for an index to answer
CUDA_MB, MAC_MB = 3000, 90  # to download, with all that torch 2.15 needs on Linux and 2.11 on a Mac
CPU_MB = 200  # where an index does not tell
INDEX_WORDS = ("-i", "--index-url", "--extra-index-url", "--no-index")


@dataclass(frozen=True)
class Machine:
    """What the choice depends on, besides what indexes hold."""

    system: str  # Linux, Darwin
    gpu: bool  # an NVIDIA one that its driver shows
    installed: str | None  # the version of torch that is there already
    asked: str = "auto"  # auto, cpu, cuda
    pip_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wheel:
    version: str
    source: str  # a folder or an index, for people
    megabytes: int | None  # None: nobody said


@dataclass(frozen=True)
class Choice:
    said: str  # what and why, in a line
    install: tuple[str, ...]  # words for pip; none: nothing to do
    cuda: bool = False  # whether what is installed should know CUDA


Finder = Callable[[], Wheel | None]


def release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[\d.]*\d", version)[0].split("."))  # type: ignore[index]


def choose(machine: Machine, requirement: str, local: Finder, cpu_index: Finder) -> Choice:
    """Looks for wheels only where the choice depends on them."""
    least = requirement.partition(">=")[2]
    if machine.installed and release(machine.installed) >= release(least):
        return Choice(f"{machine.installed} is installed and new enough ({requirement}): kept", ())
    plain = (requirement,)
    if any(word.split("=")[0] in INDEX_WORDS for word in machine.pip_args):
        return Choice("from the index that PIP_ARGS names", plain)
    if machine.system == "Darwin":
        return Choice(f"the plain index's build, about {MAC_MB} MB: on macOS it is the one for CPU and Metal", plain)
    if machine.asked == "cuda" or (machine.gpu and machine.asked == "auto"):
        why = "there is an NVIDIA GPU" if machine.gpu else "as asked"
        said = f"CUDA build from the plain index, about {CUDA_MB} MB with its libraries: {why}"
        return Choice(said, plain, cuda=True)
    why = "as asked" if machine.asked == "cpu" else "there is no NVIDIA GPU"
    if wheel := local():
        size = f" of {wheel.megabytes} MB" if wheel.megabytes else ""
        said = f"{wheel.version}, a wheel{size} that pip's settings find in {wheel.source}: {why}"
        return Choice(said, (f"torch=={wheel.version}",))
    if wheel := cpu_index():
        size = f"{wheel.megabytes} MB" if wheel.megabytes else f"about {CPU_MB} MB"
        said = f"CPU build {wheel.version}, {size} from {wheel.source}: {why}"
        return Choice(said, ("--extra-index-url", wheel.source, f"torch=={wheel.version}"))
    return Choice(
        f"the plain index's build, about {CUDA_MB} MB with CUDA libraries: {why}, but {CPU_INDEX} has no wheel for "
        "this Python or does not answer; PIP_ARGS='--find-links FOLDER' takes a CPU wheel of your own",
        plain,
    )


def newest(page: str, url: str, least: str, tag: str, arch: str) -> tuple[str, str] | None:
    """The version and address of the newest CPU wheel a page of links has for a Python and an architecture."""
    found = []
    for link in re.findall(r'href="([^"#]+)', page):
        name = unquote(link.rpartition("/")[2])
        match = re.fullmatch(rf"torch-([\d.]+\+cpu)-{tag}-{tag}-\w*linux\w*_{arch}\.whl", name)
        if match and release(match[1]) >= release(least):
            found.append((release(match[1]), match[1], urljoin(url, link)))
    return max(found)[1:] if found else None


def cpu_wheel(least: str) -> Wheel | None:
    """What PyTorch's index of CPU wheels has for this machine, if it answers."""
    url, tag = f"{CPU_INDEX}/torch/", f"cp{sys.version_info.major}{sys.version_info.minor}"
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            page = answer.read().decode()
    except OSError:
        return None
    if not (found := newest(page, url, least, tag, platform.machine())):
        return None
    version, address = found
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=PATIENCE) as answer:
            size = round(int(answer.headers["Content-Length"]) / 1e6)
    except (OSError, TypeError, ValueError):
        size = None
    return Wheel(version, CPU_INDEX, size)


def local_wheel(requirement: str, pip_args: tuple[str, ...]) -> Wheel | None:
    """What pip would install with no index at all: a wheel in a folder that its settings or PIP_ARGS name."""
    words = ("--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--no-index", "--report", "-", requirement)
    done = subprocess.run([*pip_install(), *pip_args, *words], capture_output=True, text=True)
    if done.returncode:
        return None
    found = json.loads(done.stdout)["install"][0]
    address = urlparse(found["download_info"]["url"])
    path = Path(unquote(address.path))
    size = round(path.stat().st_size / 1e6) if address.scheme == "file" and path.is_file() else None
    return Wheel(found["metadata"]["version"], str(path.parent) if size else address.netloc, size)


def nvidia_gpu() -> bool:
    """Whether the driver, if there is one, shows a GPU."""
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except (OSError, AttributeError):
        return False


def installed_torch() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def knows_cuda() -> bool:
    """Whether the torch that is installed was built with CUDA, as it says itself where nothing need be loaded."""
    file = metadata.distribution("torch").locate_file("torch/version.py")
    return bool(re.search(r"^cuda\b[^=]*=\s*'", Path(str(file)).read_text(), re.MULTILINE))


def pip_install() -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]


def torch_requirement() -> str:
    """The one place that says which torch Quire needs is its own list of dependencies."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    return next(line for line in project["dependencies"] if line.startswith("torch>="))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", choices=("auto", "cpu", "cuda"), default="auto", help="auto looks for an NVIDIA GPU")
    parser.add_argument("--dry-run", action="store_true", help="say what would be installed, and install nothing")
    parser.add_argument("pip_args", nargs="*", help="words for pip, after --")
    asked = parser.parse_args(arguments)
    pip_args = tuple(asked.pip_args)
    requirement = torch_requirement()
    machine = Machine(platform.system(), nvidia_gpu(), installed_torch(), asked.build, pip_args)
    choice = choose(
        machine,
        requirement,
        lambda: local_wheel(requirement, pip_args),
        lambda: cpu_wheel(requirement.partition(">=")[2]),
    )
    print(f"torch: {choice.said}", flush=True)
    if not choice.install:
        return 0
    command = [*pip_install(), *pip_args, *choice.install]
    if asked.dry_run:
        print(shlex.join(command))
        return 0
    if code := subprocess.run(command).returncode:
        return code
    if choice.cuda and not knows_cuda():
        print(f"torch: {metadata.version('torch')} was built without CUDA: the GPU stays unused", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
