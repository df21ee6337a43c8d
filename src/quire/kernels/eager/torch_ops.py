"""The operations in as few torch calls as they take: at decode sizes the cost is the number of calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.kernels.kv_views import LayerKV, put_tokens
from quire.kernels.op_signatures import SWIGLU_LIMIT, Activation, GatedActivation


def take(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return F.embedding(index, table)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(residual.add_(x), weight, eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rope_tables(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(positions.float(), inverse_frequencies)  # [tokens, rotary / 2]
    cos, sin = angles.cos().mul_(scale), angles.sin().mul_(scale)
    return torch.cat((cos, cos), dim=-1)[:, None].to(dtype), torch.cat((-sin, sin), dim=-1)[:, None].to(dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotary = cos.shape[-1]
    if rotary < x.shape[-1]:
        return torch.cat((rope(x[..., :rotary], cos, sin), x[..., rotary:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(rotary // 2, -1), sin)


def act(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    match kind:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "quick_gelu":
            return torch.sigmoid(x * 1.702).mul_(x)
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square_()


def act_and_mul(x: torch.Tensor, kind: GatedActivation) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    if kind == "swiglu_oai":
        return act(gate.clamp(max=SWIGLU_LIMIT), "quick_gelu").mul_(up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT).add_(1))
    return act(gate, kind).mul_(up)


def write_kv(k: torch.Tensor, v: torch.Tensor, kv: LayerKV, kv_slots: torch.Tensor) -> None:
    put_tokens(kv, k, v, kv_slots)
