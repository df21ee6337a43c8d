"""A GGUF's tensors in the shapes that safetensors have them in.

    blk.0.ssm_a [heads, 1]                          ─►  blk.0.ssm_a.weight [heads]
    blk.0.ssm_norm.weight [groups, n]               ─►  [groups * n]
    blk.0.ssm_conv1d.weight [channels, taps]        ─►  [channels, 1, taps]
    blk.0.attn_k_b, attn_v_b (latent attention)     ─►  blk.0.attn_kv_b.weight [heads * (keys + values), rank]

Refuses to know: which family a file is of, where tensors go.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import torch

from quire.kernels.reference.dequant import dequantize
from quire.types.seams import TensorInfo, WeightSource

_FLAT = re.compile(r".*\.(?:ssm_a|ssm_d|ssm_norm\.weight)")
_CONV = re.compile(r".*\.(?:ssm_conv1d|shortconv\.conv)\.weight")


class GgufTensors:
    def __init__(self, source: WeightSource):
        self._source = source
        self._tensors: dict[str, TensorInfo] = {}
        self._stored: dict[str, str] = {}  # name → the stored one
        self._joined: dict[str, tuple[TensorInfo, TensorInfo]] = {}
        stored = source.tensors()
        for name, info in stored.items():
            if name.endswith(".attn_k_b.weight") and (values := stored.get(name.replace("_k_b.", "_v_b."))) is not None:
                self._join(name.replace("_k_b.", "_kv_b."), info, values)
            elif not name.endswith((".attn_k_b.weight", ".attn_v_b.weight")):
                shown = _shown(info)
                self._tensors[shown.name], self._stored[shown.name] = shown, name

    def _join(self, name: str, keys: TensorInfo, values: TensorInfo) -> None:
        heads, rank, own = keys.shape
        shape = (heads * (own + values.shape[1]), rank)
        self._tensors[name] = TensorInfo(name, shape, "F32", 4 * math.prod(shape))
        self._joined[name] = keys, values

    def metadata(self) -> dict[str, Any]:
        return self._source.metadata()

    def tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> np.ndarray:
        if name not in self._joined:
            return self._source.read(self._stored[name])
        keys, values = (self._unpacked(info) for info in self._joined[name])
        return torch.cat((keys.transpose(1, 2), values), dim=1).contiguous().numpy().reshape(-1).view(np.uint8)

    def _unpacked(self, info: TensorInfo) -> torch.Tensor:
        rows = torch.from_numpy(self._source.read(info.name).copy()).view(math.prod(info.shape[:-1]), -1)
        return dequantize(rows, info.kind).float().view(info.shape)


def _shown(info: TensorInfo) -> TensorInfo:
    name, shape = info.name, info.shape
    if _FLAT.fullmatch(name):
        name, shape = name if name.endswith(".weight") else f"{name}.weight", (math.prod(shape),)
    elif _CONV.fullmatch(name) and len(shape) == 2:
        shape = (shape[0], 1, shape[1])
    return TensorInfo(name, shape, info.kind, info.nbytes)
