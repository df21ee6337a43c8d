"""`quire.kernels.op_signatures.Ops` on a GPU: Triton where a launch saved or fused pays, plain torch for the rest."""

from __future__ import annotations

import torch

from quire.kernels.eager import torch_ops as eager
from quire.kernels.eager.torch_ops import act, layer_norm, rope, write_kv
from quire.kernels.op_signatures import GatedActivation
from quire.kernels.triton.activation import silu_and_mul
from quire.kernels.triton.embedding_gather import gather_rows as take
from quire.kernels.triton.norm import add_rms_norm, rms_norm
from quire.kernels.triton.rope_kernel import rope_tables

__all__ = [
    "act", "act_and_mul", "add_rms_norm", "layer_norm", "rms_norm", "rope", "rope_tables", "take", "write_kv",
]  # fmt: skip


def act_and_mul(x: torch.Tensor, kind: GatedActivation) -> torch.Tensor:
    return silu_and_mul(x) if kind == "silu" else eager.act_and_mul(x, kind)
