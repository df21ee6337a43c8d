"""Stages on a GPU: Triton kernels that join what plain torch does in several launches.

    qkv:  add + norm ─► product ─► norm heads, rotate, write K and V        attend:  attention ─► product (+ residual)
    mlp:  add + norm ─► product ─► SiLU * up ─► product (+ residual)

Products belong to cuBLAS, except those of few rows that end in the residual: there a Triton product that adds it is
as fast (measured on an H200 at 4096 outputs), and the next norm has nothing to add. Refuses to know: graphs.
"""

from __future__ import annotations

import torch

from quire.kernels.triton import why_not
from quire.model.linear import DenseScheme, Linear
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
        from quire.kernels.triton.gemv import small_matmul
        from quire.kernels.triton.rope import rope_and_write

        self._small, self._rope_and_write = small_matmul, rope_and_write
        self.reasons.append("stages: Triton kernels between cuBLAS products")

    def qkv(self, layer: Layer, x: torch.Tensor | None, residual: torch.Tensor, step: Step) -> torch.Tensor:
        assert step.rope is not None
        k_pages, v_pages, group = step.kv.layers[layer.index]
        qkv = layer.qkv(self.norm(layer.input_norm, x, residual))
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
        inner = self.ops.act_and_mul(layer.up(self.norm(layer.post_norm, x, residual)), "silu")
        return self._into_residual(layer.down, inner, residual)

    def _into_residual(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor | None:
        """The product, added to the residual if that costs nothing; else handed on for the next norm to add."""
        if x.shape[0] > FEW_TOKENS or not isinstance(linear.scheme, DenseScheme):
            return linear(x)
        self._small(x, linear.state["weight"], residual=residual, bias=linear.bias, out=residual)
        return None
