"""compressed-tensors (llm-compressor, vLLM): packed integers, plain 8-bit integers, FP8, NVFP4. Activations are not
quantised here, whatever the file was made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.model.loading.formats.fp8_weights import block_size, spread
from quire.model.loading.formats.mxfp4 import E2M1, nibbles
from quire.model.loading.formats.packed_matrix import BLOCK, IntegerMatrix, Parts, block_kind, group_size, unpack
from quire.types.errors import ModelFileError
from quire.types.seams import TensorInfo

_PARTS = (
    "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
    "weight_global_scale", "input_global_scale", "input_scale", "input_zero_point",
)  # fmt: skip
_PACKED = ("pack-quantized", "marlin-24")
FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "nvfp4-pack-quantized", "dense")


class CompressedTensors:
    name = "compressed-tensors"

    def __init__(self, config: Mapping[str, Any]):
        groups = config.get("config_groups") or {}
        schemes = [group for group in groups.values() if isinstance(group, Mapping)]
        formats = {str(group.get("format") or config.get("format") or "dense") for group in schemes}
        if unknown := formats - set(FORMATS):
            raise ModelFileError(
                f"compressed-tensors format {', '.join(sorted(unknown))} is not supported; {FORMATS} are"
            )
        weights = [group["weights"] for group in schemes if isinstance(group.get("weights"), Mapping)]
        self._bits = int(weights[0].get("num_bits", 8)) if weights else 8
        self._groups = [each["group_size"] for each in weights if "group_size" in each]
        blocks = {tuple(each["block_structure"]) for each in weights if each.get("block_structure")}
        if len(blocks) > 1:
            raise ModelFileError("compressed-tensors with blocks of different sizes are not supported")
        self._block = block_size(blocks.pop()) if blocks else None
        if any(int(each.get("num_bits", 8)) != self._bits for each in weights):
            raise ModelFileError("compressed-tensors with groups of different bits are not supported")

    def split(self, name: str) -> tuple[str, str] | None:
        before, _, part = name.rpartition(".")
        return (f"{before}.weight", part) if part in _PARTS else None

    def matrix(self, infos: Mapping[str, TensorInfo], small: Parts) -> tuple[tuple[int, ...], str] | None:
        if "weight_scale" not in infos:
            return None
        if "weight_packed" not in infos:
            weight, scale = infos["weight"], infos["weight_scale"]
            return weight.shape, _whole_kind(weight, scale, "weight_zero_point" in infos)
        if "weight_global_scale" in infos:
            rows, packed = infos["weight_packed"].shape
            return (rows, packed * 2), "F32"
        rows, columns = (int(n) for n in small["weight_shape"].tolist())
        return (rows, columns), self._packed_kind(columns, infos["weight_scale"].shape, infos)

    def _packed_kind(self, columns: int, scales: tuple[int, ...], parts: Mapping[str, Any]) -> str:
        groups = scales[1] if len(scales) > 1 else 1
        centred = "weight_zero_point" not in parts
        group = group_size(columns, groups, self._groups)
        return block_kind(self._bits, columns, group, signed_zero=centred, ordered="weight_g_idx" in parts)

    def decode(self, parts: Parts, kind: str) -> torch.Tensor:
        if "weight_packed" not in parts:
            return _whole(parts, kind, self._block)
        if "weight_global_scale" in parts:
            numbers = E2M1[nibbles(parts["weight_packed"]).long()]
            return numbers * spread(parts["weight_scale"].float() / parts["weight_global_scale"].float(), numbers.shape)
        rows, columns = (int(n) for n in parts["weight_shape"].tolist())
        scales = parts["weight_scale"].reshape(rows, -1)
        numbers = unpack(parts["weight_packed"], self._bits, dim=1, count=columns)
        middle = 1 << (self._bits - 1)
        zeros = torch.full(scales.shape, middle, dtype=torch.int16)
        if "weight_zero_point" in parts:
            zeros = unpack(parts["weight_zero_point"], self._bits, dim=0, count=rows).short()
        group = group_size(columns, scales.shape[1], self._groups)
        return IntegerMatrix(numbers, scales, zeros, self._bits, group, parts.get("weight_g_idx")).encoded(kind)


def _whole_kind(weight: TensorInfo, scale: TensorInfo, shifted: bool) -> str:
    by_row = len(scale.shape) < 2 or scale.shape[-1] == 1
    centred = weight.kind == "I8" and by_row and not shifted and weight.shape[1] % BLOCK == 0
    return "Q8_0" if centred else "F32"


def _whole(parts: Parts, kind: str, block: tuple[int, int] | None) -> torch.Tensor:
    """8-bit numbers, not packed."""
    weight, scale = parts["weight"], parts["weight_scale"]
    zeros = parts.get("weight_zero_point")
    if kind == "Q8_0":
        rows = scale.reshape(-1, 1).expand(len(weight), 1)
        shifted = (weight.short() + 128).to(torch.uint8)
        zeros = torch.full(rows.shape, 128, dtype=torch.int16)
        return IntegerMatrix(shifted, rows, zeros, 8, weight.shape[1]).encoded("Q8_0")
    numbers = weight.float()
    if zeros is not None:
        numbers = numbers - spread(zeros.float(), weight.shape, block)
    return numbers * spread(scale.float(), weight.shape, block)
