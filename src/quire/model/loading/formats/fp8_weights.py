"""FP8 checkpoints: 8-bit floats with a scale for the whole matrix, for each output, or for each block (DeepSeek's
128 x 128)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.model.loading.formats.packed_matrix import Parts
from quire.types.errors import ModelFileError
from quire.types.seams import TensorInfo

_SCALES = ("weight_scale_inv", "weight_scale")
_UNUSED = ("input_scale", "activation_scale", "k_scale", "v_scale")  # activations keep their bits here


class Fp8Weights:
    name = "fp8"

    def __init__(self, config: Mapping[str, Any]):
        block = config.get("weight_block_size")
        self._block = None if block is None else block_size(block)

    def split(self, name: str) -> tuple[str, str] | None:
        before, _, part = name.rpartition(".")
        return (f"{before}.weight", part) if part in ("weight", *_SCALES, *_UNUSED) else None

    def matrix(self, infos: Mapping[str, TensorInfo], small: Parts) -> tuple[tuple[int, ...], str] | None:
        weight = infos.get("weight")
        if weight is None or not any(name in infos for name in _SCALES):
            return None
        return weight.shape, "F32"

    def decode(self, parts: Parts, kind: str) -> torch.Tensor:
        weight = parts["weight"].float()
        scale = next(parts[name] for name in _SCALES if name in parts).float()
        return weight * spread(scale, weight.shape, self._block)


def block_size(block: Any) -> tuple[int, int]:
    """Rows and columns of a block, as a config says them."""
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise ModelFileError(f"scales of blocks need two whole numbers, and the config says {block}")
    return block[0], block[1]


def spread(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int] | None = None) -> torch.Tensor:
    """Scales of the whole, of rows, or of blocks, as they apply to a matrix of this shape."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.dim() == 1 or scale.shape[1] == 1:
        return scale.reshape(-1, 1)
    rows, columns = block or (shape[0] // scale.shape[0], shape[1] // scale.shape[1])
    if rows < 1 or columns < 1 or scale.shape != (-(-shape[0] // rows), -(-shape[1] // columns)):
        raise ValueError(f"scales {tuple(scale.shape)} do not fit {tuple(shape)}, in blocks of {(rows, columns)}")
    wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: shape[0], : shape[1]]
