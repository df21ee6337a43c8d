"""Packages that are installed, against the lower bounds that this one declares: another package may have asked for an
older version after us."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata

BOUND = re.compile(r"([\w.-]+)>=([\d.]+)")


def too_old(requirements: Iterable[str] | None = None) -> dict[str, str]:
    """Package → what is wrong and what to do, in one line."""
    if requirements is None:
        try:
            requirements = metadata.requires("quire") or ()
        except metadata.PackageNotFoundError:  # run from a folder
            return {}
    found = {}
    for requirement in requirements:
        bound = BOUND.match(requirement)
        if bound is None or "extra ==" in requirement:
            continue
        name, least = bound.groups()
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if _parts(version) < _parts(least):
            found[name] = f"{name} {version} is too old: pip install '{name}>={least}'"
    return found


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", re.split(r"[a-z+]", version)[0])))
