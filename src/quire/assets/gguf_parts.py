"""A GGUF model in one file, or split into several: NAME-00001-of-00003.gguf ...

The first part carries the key-values of the model; every part its number (`split.no`, from 0), how many there are
(`split.count`) and how many tensors all of them hold (`split.tensors.count`).

Knows: how parts are named and numbered. Refuses to know: what keys mean to a model.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from quire.assets.gguf_reader import GGUFFile
from quire.types.errors import ModelFileError
from quire.types.seams import TensorInfo

MAX_PARTS = 10_000
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)


def part_paths(path: Path) -> list[Path]:
    """All files of the model that this one is of, by their names; itself, if it is not named like a part."""
    match = _PART.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= MAX_PARTS:
        return [path]
    count = int(match[3])
    return [path.with_name(f"{match[1]}-{part:05d}-of-{match[3]}{match[4]}") for part in range(1, count + 1)]


def model_stem(path: Path) -> str:
    """What the model is called: the file's name without its ending and the number of a part."""
    match = _PART.fullmatch(path.name)
    return path.stem if match is None else match[1]


class GGUFModel:
    """An open GGUF model, whole or split: a WeightSource."""

    def __init__(self, path: Path):
        paths = part_paths(path)
        missing = [part.name for part in paths if not part.exists()]
        if missing and path.parent.is_dir() and len(paths) > 1:
            some = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
            raise ModelFileError(
                f"{path.parent} has {len(paths) - len(missing)} of the {len(paths)} parts of {model_stem(path)}; "
                f"missing: {some}; fetch the model again"
            )
        files = [GGUFFile(part) for part in paths]
        self._metadata = files[0].metadata()
        self._homes: dict[str, GGUFFile] = {}
        for number, (part, file) in enumerate(zip(paths, files, strict=True)):
            _check_part(part, file.metadata(), number, len(paths))
            for name in file.tensors():
                if name in self._homes:
                    raise ModelFileError(f"{part} holds the tensor {name!r} again, which another part of it has")
                self._homes[name] = file
        said = {file.metadata().get("split.tensors.count", len(self._homes)) for file in files}
        if len(paths) > 1 and said != {len(self._homes)}:
            counts = " and ".join(str(count) for count in said)
            raise ModelFileError(
                f"the {len(paths)} parts of {paths[0]} hold {len(self._homes)} tensors, and they say {counts}; they "
                "are not of one model: fetch it again"
            )

    def metadata(self) -> dict[str, Any]:
        return self._metadata

    def tensors(self) -> dict[str, TensorInfo]:
        return {name: file.tensors()[name] for name, file in self._homes.items()}

    def read(self, name: str) -> np.ndarray:
        return self._homes[name].read(name)


def _check_part(path: Path, metadata: dict[str, Any], number: int, count: int) -> None:
    said = metadata.get("split.count", 0)
    if count == 1 and said in (0, 1):
        return
    if count == 1:
        raise ModelFileError(
            f"{path} is one of {said} parts of a split model, but is not named like one: call them "
            f"NAME-00001-of-{said if isinstance(said, int) else 2:05d}.gguf and so on, in one folder"
        )
    place = metadata.get("split.no")
    if said != count or place != number:
        raise ModelFileError(
            f"{path} is named part {number + 1} of {count}, but its header says split.no {place}, split.count {said}; "
            "the parts are not of one model, or were renamed: fetch it again"
        )
