"""4-bit floats (e2m1) with a shared exponent for each 32 (MXFP4), as gpt-oss ships its experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.model.loading.formats.packed_matrix import Parts
from quire.types.seams import TensorInfo

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


class Mxfp4:
    """Experts' matrices [experts, out, blocks, 16 bytes], handed on as their 16-bit siblings are stored: [experts, in,
    out]."""

    name = "mxfp4"

    def __init__(self, config: Mapping[str, Any]):
        pass

    def split(self, name: str) -> tuple[str, str] | None:
        for part in ("blocks", "scales"):
            if name.endswith(f"_proj_{part}"):
                return name.removesuffix(f"_{part}"), part
        return None

    def matrix(self, infos: Mapping[str, TensorInfo], small: Parts) -> tuple[tuple[int, ...], str] | None:
        experts, rows, blocks, _ = infos["blocks"].shape
        return (experts, blocks * 32, rows), "F32"

    def decode(self, parts: Parts, kind: str) -> torch.Tensor:
        numbers = nibbles(parts["blocks"])  # [experts, out, blocks, 32]
        scaled = torch.ldexp(E2M1[numbers.long()], parts["scales"].int().unsqueeze(-1) - 127)
        return scaled.flatten(2).transpose(1, 2).contiguous()


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Two numbers a byte along the last dimension, the low one first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
