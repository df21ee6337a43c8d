"""A weight source in which every expert's matrix is a tensor of its own, however the file stacks them.

    blk.0.ffn_gate_exps.weight [8, n, m]            ─►  blk.0.ffn_gate_exps.0.weight [n, m] ... 7
    layers.0.mlp.experts.gate_up_proj_bias [8, n]   ─►  layers.0.mlp.experts.0.gate_up_proj.bias [n] ... 7

Refuses to know: which family a file is of, where tensors go.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from quire.types.seams import TensorInfo, WeightSource

_STACKED = re.compile(
    r"(.*_exps\.|.*\.experts\.|.*\.block_sparse_moe\.)((?:[a-z_]+_proj|[a-z]+_linear)\.?|)(weight|bias|blocks|)"
)


class ExpertTensors:
    def __init__(self, source: WeightSource):
        self._source = source
        self._tensors: dict[str, TensorInfo] = {}
        self._parts: dict[str, tuple[str, int, int]] = {}  # name → the stored one, which expert, of how many
        for name, info in source.tensors().items():
            parts = _split(name, info)
            self._tensors |= {part.name: part for part in parts} if parts else {name: info}
            self._parts |= {part.name: (name, expert, len(parts)) for expert, part in enumerate(parts)}

    def metadata(self) -> dict[str, Any]:
        return self._source.metadata()

    def tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> np.ndarray:
        if name not in self._parts:
            return self._source.read(name)
        stored, expert, count = self._parts[name]
        return self._source.read(stored).reshape(count, -1)[expert]


def is_stacked(info: TensorInfo) -> bool:
    """Whether a tensor holds the matrices of several experts."""
    return bool(_split(info.name, info))


def _split(name: str, info: TensorInfo) -> list[TensorInfo]:
    """One of each expert; empty: it is not stacked."""
    plain = re.sub(r"_(bias|blocks)$", r".\1", name)
    match = _STACKED.fullmatch(plain)
    if match is None or len(info.shape) < 2:
        return []
    before, inner, kind = match.groups()
    inner = inner and f"{inner.removesuffix('.')}."
    count = info.shape[0]
    return [
        TensorInfo(f"{before}{expert}.{inner}{kind or 'weight'}", info.shape[1:], info.kind, info.nbytes // count)
        for expert in range(count)
    ]
