"""Which kernel multiplies a shape: the one measured to be the fastest on this chip, as far as one was.

    shipped (`library/cublas.json`, of an H200) ◄── a file of this chip's own, as engines measure when they are idle

A choice is a kernel of cuBLAS by name, a tiling of ours, or `LIBRARY`: what torch calls is the fastest. What was not
measured is left to whoever asks. Refuses to know: how anything is measured, layers.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import astuple
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch

from quire.kernels.library import cublas
from quire.kernels.library.cublas import Algorithm
from quire.kernels.triton import configs
from quire.kernels.triton.configs import Matmul

log = logging.getLogger(__name__)

LIBRARY: Literal["library"] = "library"  # of a gated product: by its plain choice, the gate apart
Choice = Algorithm | Matmul | Literal["library"]

SHIPPED_FOR = (9, 0, 132)  # an H200, or an H100 with as many processors
FIXED_ROWS = 1536  # steps have fixed sizes up to here
# Numbers of rows in larger ones for which choices are measured; those between take the next of them.
CHUNKS = (2048, 3072, 4096, 6144, 8192, 12288, 16384)
MAX_FILE = 4 << 20
SEARCH = 1  # changes with what is tried and what it is compared with: older files are measured anew


class Shape(NamedTuple):
    """Of a product."""

    element: int  # bytes
    outputs: int
    width: int
    rows: int
    gated: bool = False  # gate and up, with the SiLU behind them


class _File(msgspec.Struct):
    device: str
    cublas: int
    search: int
    kernels: dict[str, dict[str, dict[str, list[int]]]]  # bytes of an element → shape → rows → a choice


class ProductChoices:
    def __init__(self, chip: str = "", library: int = 0, shipped: bool = False):
        """`chip`: what they are for; `library`: the version of cuBLAS; `shipped`: whether those of the table hold."""
        self._chip, self._library = chip, library
        self._known: dict[Shape, Choice] = dict(_shipped()) if shipped else {}
        self._measured: set[Shape] = set()  # of those, on this machine
        self._path: Path | None = None
        self.asked: dict[Shape, bool] = {}  # whether the product is added to something

    def find(self, shape: Shape, *, adds: bool = False) -> Choice | None:
        """None: nothing was measured for it."""
        rows = shape.rows
        if rows <= FIXED_ROWS:
            self.asked[shape] = adds
            return self._known.get(shape)
        above = [shape._replace(rows=size) for size in CHUNKS if size >= rows] or [shape._replace(rows=CHUNKS[-1])]
        self.asked[above[0]] = adds
        return next((self._known[each] for each in above if each in self._known), None)

    def put(self, shape: Shape, choice: Choice) -> None:
        self._known[shape] = choice
        self._measured.add(shape)

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._known

    def use(self, folder: Path) -> None:
        """Take what was measured on such a chip before, and keep there what will be."""
        if not self._chip:
            return
        self._path = folder / (re.sub(r"[^a-z0-9]+", "-", self._chip.lower()) + ".json")
        self._read()

    def _read(self) -> None:
        assert self._path is not None
        try:
            if self._path.stat().st_size > MAX_FILE:
                raise ValueError("it is too large")
            found = msgspec.json.decode(self._path.read_bytes(), type=_File)
            choices = dict(_decoded(found.kernels))
        except FileNotFoundError:
            return
        except (OSError, ValueError, msgspec.DecodeError) as error:
            log.warning("what was measured of products is not used: %s: %s", self._path, error)
            return
        if (found.device, found.cublas, found.search) == (self._chip, self._library, SEARCH):
            for shape, choice in choices.items():
                if shape not in self._measured:
                    self.put(shape, choice)

    def save(self) -> None:
        """Beside what other engines have measured meanwhile."""
        if self._path is None:
            return
        self._read()
        kernels: dict[str, dict[str, dict[str, list[int]]]] = {}
        for shape in sorted(self._measured):
            name = f"{shape.outputs}x{shape.width}{' gated' * shape.gated}"
            kernels.setdefault(str(shape.element), {}).setdefault(name, {})[str(shape.rows)] = _numbers(
                self._known[shape]
            )
        written = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            written.write_bytes(msgspec.json.encode(_File(self._chip, self._library, SEARCH, kernels)))
            written.replace(self._path)
        except OSError as error:
            log.warning("what was measured of products is not kept: %s", error)
            with suppress(OSError):
                written.unlink(missing_ok=True)
            self._path = None

    def describe(self, products: Collection[tuple[int, int, int]]) -> list[str]:
        """Of these (bytes of an element, outputs, width): by what they are multiplied, for people."""
        kinds: dict[str, Counter[str]] = {}
        for shape, choice in self._known.items():
            if shape[:3] in products:
                name = f"{shape.outputs:,} x {shape.width:,}{', with the gate' * shape.gated}"
                kinds.setdefault(name, Counter())[_kind(choice)] += 1
        lines = [
            f"products {name}: measured for {sum(found.values())} numbers of rows: "
            + ", ".join(f"{count} {kind}" for kind, count in found.most_common())
            for name, found in sorted(kinds.items())
        ]
        if self._measured and self._path is not None:
            lines.append(f"products: measured on this machine, kept in {self._path}")
        return lines


def choices(device: torch.device) -> ProductChoices:
    """Of this process, for a device; nothing is known, and nothing kept, where there is no such library."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _choices(device)


@cache
def _choices(device: torch.device) -> ProductChoices:
    library = cublas.version(device)
    if not library:
        return ProductChoices()
    chip = torch.cuda.get_device_properties(device)
    processors = chip.multi_processor_count
    shipped = (chip.major, chip.minor, processors) == SHIPPED_FOR
    return ProductChoices(f"{chip.name}, {processors} processors", library, shipped)


@cache
def _shipped() -> dict[Shape, Choice]:
    stored = json.loads((resources.files("quire.kernels.library") / "cublas.json").read_text())["kernels"]
    return dict(_decoded(stored))


def _decoded(kernels: dict[str, dict[str, dict[str, list[int]]]]) -> Iterator[tuple[Shape, Choice]]:
    for element, shapes in kernels.items():
        known = {*configs.small_matmuls(int(element), 1), *configs.small_matmuls(int(element), 64)}
        known |= {*configs.small_matmuls(int(element), 128), *configs.gated_matmuls(int(element))}
        for name, sizes in shapes.items():
            size, _, gated = name.partition(" ")
            outputs, width = map(int, size.split("x"))
            for rows, numbers in sizes.items():
                choice = _choice(numbers)
                if not isinstance(choice, Matmul) or choice in known:  # others may not fit the chip
                    yield Shape(int(element), outputs, width, int(rows), gated == "gated"), choice


def _choice(numbers: list[int]) -> Choice:
    if not numbers:
        return LIBRARY
    if len(numbers) <= 3:
        return Algorithm(*numbers)
    block_n, block_k, warps, stages, splits, rows, persistent = numbers
    return Matmul(block_n, block_k, warps, stages, splits, rows, bool(persistent))


def _numbers(choice: Choice) -> list[int]:
    if isinstance(choice, Algorithm):
        return [number for number in choice if number is not None]
    if isinstance(choice, Matmul):
        return [int(number) for number in astuple(choice)]
    return []


def _kind(choice: Choice) -> str:
    if isinstance(choice, Algorithm):
        return "by a named kernel of cuBLAS"
    return "by Triton" if isinstance(choice, Matmul) else "as the library prefers"
