"""Stages on a GPU: Triton kernels that join what plain torch does in several launches.

    qkv:  add + norm ─► product ─► norm heads, rotate, write K and V        attend:  attention ─► product (+ residual)
    mlp:  add + norm ─► product ─► SiLU * up ─► product (+ residual)

Products belong to cuBLAS, except those of few rows that end in the residual: there a Triton product that adds it is
as fast (measured on an H200 at 4096 outputs), and the next norm has nothing to add. Refuses to know: graphs.
"""

from __future__ import annotations

import torch

from quire.kernels.triton import why_not
from quire.model.fp8 import Fp8Scheme
from quire.model.linear import DenseScheme, Linear, Plain
from quire.model.spec import DecoderSpec
from quire.model.stages import Layer, Stages, Step

FEW_TOKENS = 32  # up to here the product into the residual is Triton's


def choose_stages(spec: DecoderSpec, device: torch.device) -> Stages:
    """Fused stages where they can run, plain ones elsewhere; `reasons` says which."""
    refusal = why_not(device)
    if refusal is None and (spec.norm != "rms" or spec.rope is None or not spec.gated_mlp or spec.activation != "silu"):
        refusal = f"{spec.architecture} is not made of RMS norms, rotary positions and SwiGLU"
    if refusal is None:
        return FusedStages(spec, device)
    stages = Stages(spec, device)
    stages.reasons.append(f"stages: plain torch, not fused: {refusal}")
    return stages


class FusedStages(Stages):
    def __init__(self, spec: DecoderSpec, device: torch.device):
        super().__init__(spec, device)
        from quire.kernels.triton.activation import quantise_fp8
        from quire.kernels.triton.gemv import small_matmul
        from quire.kernels.triton.norm import rms_norm_fp8
        from quire.kernels.triton.rope import rope_and_write

        self._small, self._rope_and_write = small_matmul, rope_and_write
        self._quantise, self._norm_fp8 = quantise_fp8, rms_norm_fp8
        self.reasons.append("stages: Triton kernels between cuBLAS products")

    def qkv(self, layer: Layer, x: torch.Tensor | None, residual: torch.Tensor, step: Step) -> torch.Tensor:
        assert step.rope is not None
        k_pages, v_pages, group = step.kv.layers[layer.index]
        qkv = self._product(layer.qkv, layer.input_norm, x, residual)
        return self._rope_and_write(
            qkv,
            layer.attention.heads,
            *step.rope,
            k_pages,
            v_pages,
            step.batch.groups[group].kv_slots,
            q_norm=layer.q_norm.weight if layer.q_norm is not None else None,
            k_norm=layer.k_norm.weight if layer.k_norm is not None else None,
            eps=self._eps,
        )

    def attend(self, layer: Layer, q: torch.Tensor, residual: torch.Tensor, step: Step) -> torch.Tensor | None:
        return self._into_residual(layer.o, self.attention(layer, q, step).flatten(1), residual)

    def mlp(self, layer: Layer, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor | None:
        up = self._product(layer.up, layer.post_norm, x, residual)
        if isinstance(layer.down.scheme, Fp8Scheme):
            return layer.down.scheme.multiply(layer.down.state, *self._quantise(up, gated=True), layer.down.bias)
        return self._into_residual(layer.down, self.ops.act_and_mul(up, "silu"), residual)

    def _product(self, linear: Linear, norm: Plain, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """residual += x, its norm, and the product with it; an 8-bit product's norm comes out in 8 bits."""
        if not isinstance(linear.scheme, Fp8Scheme):
            return linear(self.norm(norm, x, residual))
        first, second = (residual, None) if x is None else (x, residual)
        return linear.scheme.multiply(
            linear.state, *self._norm_fp8(first, second, norm.weight, self._eps), linear.bias
        )

    def _into_residual(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor | None:
        """The product, added to the residual if that costs nothing; else handed on for the next norm to add."""
        if x.shape[0] > FEW_TOKENS or not isinstance(linear.scheme, DenseScheme):
            return linear(x)
        self._small(x, linear.state["weight"], residual=residual, bias=linear.bias, out=residual)
        return None
