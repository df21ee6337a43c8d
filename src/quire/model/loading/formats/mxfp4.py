"""4-bit floats (e2m1) with a shared exponent for each 32 (MXFP4), as gpt-oss ships its experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.model.loading.formats.packed_matrix import Parts
from quire.types.seams import TensorInfo

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


class Mxfp4:
    """Experts' matrices [experts, out, blocks, 16 bytes], under the name of their blocks: their 16-bit siblings are
    [experts, in, out]."""

    name = "mxfp4"

    def __init__(self, config: Mapping[str, Any]):
        pass

    def split(self, name: str) -> tuple[str, str] | None:
        for part in ("blocks", "scales"):
            if name.endswith(f"_proj_{part}"):
                return f"{name.removesuffix(part)}blocks", part
        return None

    def matrix(self, infos: Mapping[str, TensorInfo], small: Parts) -> tuple[tuple[int, ...], str] | None:
        experts, rows, blocks, _ = infos["blocks"].shape
        return (experts, rows, blocks * 32), "MXFP4"

    def decode(self, parts: Parts, kind: str) -> torch.Tensor:
        numbers, exponents = nibbles(parts["blocks"]), parts["scales"].unsqueeze(-1)  # [experts, out, blocks, 32]
        if kind == "MXFP4":  # number i in the low bits of byte i, i + 16 in the high ones
            return torch.cat((exponents, numbers[..., :16] | numbers[..., 16:] << 4), dim=-1)
        return torch.ldexp(E2M1[numbers.long()], exponents.int() - 127).flatten(2)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Two numbers a byte along the last dimension, the low one first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
