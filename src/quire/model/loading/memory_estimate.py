"""How much memory a model takes, counted on its real structure without allocating it."""

from __future__ import annotations

import torch

from quire.model.decoder import Model
from quire.model.decoder_spec import DecoderSpec


def parameter_count(spec: DecoderSpec) -> int:
    """Tied weights count once."""
    return sum(tensor.numel() for tensor in _tensors(spec, torch.float32))


def weight_bytes(spec: DecoderSpec, dtype: torch.dtype) -> int:
    return sum(tensor.nbytes for tensor in _tensors(spec, dtype))


def _tensors(spec: DecoderSpec, dtype: torch.dtype) -> list[torch.Tensor]:
    model = Model(spec, device=torch.device("meta"), dtype=dtype)
    learned = [module for module in model.modules().values() if module.needs()]
    return [tensor for module in learned for tensor in module.tensors().values()]
