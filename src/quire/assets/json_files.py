"""Mapping and reading files that may be wrong: every size is checked before a byte is copied.

Knows: paths, sizes, JSON. Refuses to know: what the bytes mean, where the files came from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from quire.types.errors import ModelFileError

MAX_JSON = 64 << 20


class BeginningTooShort(Exception):
    """A header goes on behind the bytes of a file that were given; `needed` are not enough for certain, but more."""

    def __init__(self, needed: int):
        super().__init__(f"at least {needed} bytes are needed")
        self.needed = needed


def map_file(path: Path) -> np.ndarray:
    """The file as a read-only uint8 array: pages are read when touched, nothing is copied."""
    try:
        if not path.is_file():
            raise ModelFileError(f"{path} is not a regular file")
        if path.stat().st_size == 0:
            raise ModelFileError(f"{path} is empty; the download was probably interrupted, fetch it again")
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object without repeated keys (readers disagree about which of two wins, so neither does)."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key appears twice")
        return found

    try:
        value = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ModelFileError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{where} holds a JSON {type(value).__name__}; an object was expected")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON:
            raise ModelFileError(f"{path} has {size} bytes; JSON files of a model may have at most {MAX_JSON}")
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error
