"""bitsandbytes: 4 bits by a table of values (nf4, fp4) with a largest number for each block, these quantised again in
most files; and 8 bits with one for each output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from quire.model.loading.formats.packed_matrix import Parts
from quire.types.errors import ModelFileError
from quire.types.seams import TensorInfo

_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STATE = "quant_state.bitsandbytes__"


class _QuantState(msgspec.Struct):
    shape: list[int]
    blocksize: int
    nested_blocksize: int = 256
    nested_offset: float = 0.0


class BitsAndBytes:
    name = "bitsandbytes"

    def __init__(self, config: Mapping[str, Any]):
        pass

    def split(self, name: str) -> tuple[str, str] | None:
        if name.endswith(".SCB"):
            return f"{name.removesuffix('.SCB')}.weight", "SCB"
        if name.endswith(".weight_format"):
            return f"{name.removesuffix('.weight_format')}.weight", "weight_format"
        before, middle, part = name.partition(".weight")
        if not middle:
            return None
        part = part.removeprefix(".")
        if part.startswith(_STATE):
            return f"{before}.weight", "state"
        return (f"{before}.weight", part or "weight") if part in ("", *_PARTS) else None

    def matrix(self, infos: Mapping[str, TensorInfo], small: Parts) -> tuple[tuple[int, ...], str] | None:
        if "SCB" in infos:
            return infos["weight"].shape, "F32"
        if "state" not in infos:
            return None
        return tuple(_state(small).shape), "F32"

    def decode(self, parts: Parts, kind: str) -> torch.Tensor:
        if "SCB" in parts:
            return parts["weight"].float() * parts["SCB"].float()[:, None] / 127
        state, largest = _state(parts), parts["absmax"]
        if "nested_absmax" in parts:
            blocks = parts["nested_quant_map"].float()[largest.long()]
            coarse = parts["nested_absmax"].float().repeat_interleave(state.nested_blocksize)[: blocks.numel()]
            largest = blocks * coarse + state.nested_offset
        packed = parts["weight"].flatten()
        numbers = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()
        values = parts["quant_map"].float()[numbers.long()]
        by_block = largest.float().repeat_interleave(state.blocksize)[: values.numel()]
        return (values * by_block).view(state.shape)


def _state(parts: Parts) -> _QuantState:
    try:
        state = msgspec.json.decode(parts["state"].numpy().tobytes(), type=_QuantState)
    except (KeyError, msgspec.DecodeError) as error:
        raise ModelFileError(f"a 4-bit matrix has no readable quantization state: {error}") from error
    if len(state.shape) != 2 or min(state.shape) < 1 or state.blocksize < 1 or state.nested_blocksize < 1:
        raise ModelFileError(f"a 4-bit matrix has a quantization state that does not work out: {state}")
    return state
