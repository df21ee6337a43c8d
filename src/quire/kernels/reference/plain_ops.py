"""Operations as their definitions read (`quire.kernels.op_signatures` has the signatures)."""

from __future__ import annotations

import math

import torch

from quire.kernels.kv_views import LayerKV, encode
from quire.kernels.op_signatures import SWIGLU_LIMIT, Activation, GatedActivation


def take(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table[index]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    residual.copy_(residual + x)
    return rms_norm(residual, weight, eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    wide = x.float()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    normed = centred / torch.sqrt((centred * centred).mean(dim=-1, keepdim=True) + eps)
    normed = normed * weight.float()
    return (normed if bias is None else normed + bias.float()).to(x.dtype)


def rope_tables(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions.float()[:, None] * inverse_frequencies.float()[None, :]  # [tokens, rotary / 2]
    cos, sin = torch.cos(angles) * scale, torch.sin(angles) * scale
    return torch.cat((cos, cos), dim=-1)[:, None].to(dtype), torch.cat((-sin, sin), dim=-1)[:, None].to(dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotary = cos.shape[-1]
    rotated, rest = x[..., :rotary].float(), x[..., rotary:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos.float() + torch.cat((second, first), dim=-1) * sin.float()
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


def act(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    wide = x.float()
    match kind:
        case "silu":
            wide = wide / (1 + torch.exp(-wide))
        case "gelu":
            wide = wide * 0.5 * (1 + torch.erf(wide / math.sqrt(2)))
        case "gelu_tanh":
            wide = wide * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        case "quick_gelu":
            wide = wide / (1 + torch.exp(-1.702 * wide))
        case "relu":
            wide = torch.maximum(wide, torch.zeros_like(wide))
        case "relu2":
            wide = torch.maximum(wide, torch.zeros_like(wide)) ** 2
    return wide.to(x.dtype)


def act_and_mul(x: torch.Tensor, kind: GatedActivation) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    if kind == "swiglu_oai":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
        kind = "quick_gelu"
    return (act(gate, kind) * up).to(x.dtype)


def write_kv(k: torch.Tensor, v: torch.Tensor, kv: LayerKV, kv_slots: torch.Tensor) -> None:
    size = kv.k_pages.shape[1]
    for token, slot in enumerate(kv_slots.tolist()):
        for (numbers, scales), x in zip(kv.sides[: 1 if kv.shared else 2], (k, v), strict=False):
            stored, beside = encode(x[token], numbers.dtype, scaled=scales is not None)
            numbers[slot // size, slot % size] = stored
            if scales is not None and beside is not None:
                scales[slot // size, slot % size] = beside
