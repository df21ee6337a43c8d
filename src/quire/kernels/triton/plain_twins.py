"""Plain torch twins of the fused operations that have no single counterpart in `reference/`."""

from __future__ import annotations

import torch

from quire.kernels.kv_views import LayerKV, put_tokens
from quire.kernels.reference import plain_ops as ops

FP8 = torch.float8_e4m3fn


def quantise_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as (8-bit floats, float32 scales [rows])."""
    wide = x.float()
    scales = wide.abs().amax(dim=-1).clamp(min=1e-12) * (1.0 / 448.0)
    return (wide / scales[:, None]).clamp(-448.0, 448.0).to(FP8), scales


def rope_and_write(
    qkv: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor, kv: LayerKV,
    kv_slots: torch.Tensor, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None, eps: float = 0.0,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    kv_heads, dim = kv.k_pages.shape[2:]
    q, k, v = qkv.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = ops.rms_norm(q, q_norm, eps), ops.rms_norm(k, k_norm, eps)
    q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
    if kv.k_scales is None and kv.k_pages.element_size() == 1:
        k, v = k.clamp(-448.0, 448.0), v.clamp(-448.0, 448.0)
    put_tokens(kv, k, v, kv_slots)
    if q_out is None:
        q_out = qkv[:, : heads * dim].unflatten(1, (heads, dim))
    return q_out.copy_(q)


def matmul(
    x: torch.Tensor,  # [rows, k]
    weight: torch.Tensor,  # [n, k]
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """In float32 inside; `gemv.row_matmul` and `gemv.small_matmul` say what the options mean."""
    wide = x.float()
    if norm is not None:
        wide = wide * torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + eps) * norm.float()
    y = wide @ weight.float().T
    if x_scale is not None:
        y = y * x_scale[:, None]
    if weight_scale is not None:
        y = y * weight_scale[None, :]
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = gate / (1 + torch.exp(-gate)) * up
    if residual is not None:
        y = y + residual.float()
    default = residual.dtype if residual is not None else x.dtype
    return y.to(out_dtype or default)
