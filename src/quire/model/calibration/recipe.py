"""How a checkpoint is to be quantised, and what of each published method that means.

    awq           4 bits with zeros; inputs scaled by how large they are, ranges clipped (Lin et al. 2023)
    gptq          4 bits with zeros; what rounding a column costs is made up for by later ones (Frantar et al. 2022)
    smoothquant   8 bits by output channel; activations' outliers migrated into weights (Xiao et al. 2022)
    fp8           e4m3 by output channel; of its scales that by which what inputs make of a row's errors is least

Refuses to know: models, files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from quire.types.errors import ConfigError

Scheme = Literal["awq", "gptq", "smoothquant", "fp8"]
SCHEMES: tuple[Scheme, ...] = ("awq", "gptq", "smoothquant", "fp8")
GROUPS = (128, 64, 32)  # what kernels elsewhere have, too


@dataclass(frozen=True)
class Recipe:
    scheme: Scheme
    group_size: int = 128
    act_order: bool | None = None  # gptq: columns in the order of how much they matter (default: yes)
    alpha: float = 0.5  # smoothquant: how much of the difficulty goes into the weights
    keep: str | None = None  # modules whose names this pattern finds stay as they are

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise ConfigError(f"scheme {self.scheme!r} is not known; there are {', '.join(SCHEMES)}")
        if self.group_size not in GROUPS:
            raise ConfigError(f"group_size {self.group_size} is not supported; {', '.join(map(str, GROUPS))} are")
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha must be from 0 to 1, not {self.alpha}")
        if self.act_order is not None and self.scheme != "gptq":
            raise ConfigError(f"act_order is for gptq; {self.scheme} has no order of columns")
        try:
            re.compile(self.keep or "")
        except re.error as error:
            raise ConfigError(f"keep {self.keep!r} is not a pattern: {error}") from error

    @property
    def bits(self) -> int:
        return 4 if self.scheme in ("awq", "gptq") else 8

    @property
    def ordered(self) -> bool:
        return self.scheme == "gptq" and self.act_order is not False

    @property
    def symmetric(self) -> bool:
        return not self.grouped

    @property
    def grouped(self) -> bool:
        return self.bits == 4

    def kept(self, module: str) -> bool:
        return self.keep is not None and re.search(self.keep, module) is not None

    def group_of(self, columns: int) -> int | None:
        """Columns that share a scale: the group size, or the largest smaller one that divides them; None: none does."""
        if not self.grouped:
            return columns
        return next((size for size in GROUPS if size <= self.group_size and columns % size == 0), None)
