"""A norm's weights and what kind it is."""

from __future__ import annotations

import torch

from quire.model.blocks.linear import Plain
from quire.model.decoder_spec import Norms


class Norm(Plain):
    """An RMS norm, or a LayerNorm. Where a file has its weight less one, loading adds that."""

    def __init__(self, size: int, norms: Norms, *, device: torch.device, dtype: torch.dtype):
        super().__init__((size,), bias=norms.bias, device=device, dtype=dtype)
        self.eps = norms.eps
        self.centred = norms.kind == "layer"  # a LayerNorm: the mean is taken off
        self.replaces = norms.replaces  # takes the place of what it is the norm of
        self._learned = norms.weight
        if not self._learned:
            self.weight.fill_(1)

    def needs(self) -> dict[tuple[str, int], tuple[int, ...]]:
        return super().needs() if self._learned else {}
