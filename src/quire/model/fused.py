"""Stages on a GPU: Triton kernels that join what plain torch does in several launches.

With few tokens a step reads every weight once and does little else, so each product takes along what surrounds it:

    qkv:  norm + product  ─►  norm heads, rotate, write K and V     attend:  attention  ─►  product + residual
    mlp:  norm + product + SiLU * up  ─►  product + residual        head:    product

With many tokens, products belong to cuBLAS, and only what lies between them is joined. Refuses to know: graphs.
"""

from __future__ import annotations

import torch

from quire.kernels.triton import why_not
from quire.model.linear import DenseScheme, Linear
from quire.model.spec import DecoderSpec
from quire.model.stages import Layer, Stages, Step

FEW_TOKENS = 16  # up to here Triton's small products beat cuBLAS and a separate norm (measured on an H200)


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
        self.reasons.append(f"stages: fused Triton, products joined with their surroundings up to {FEW_TOKENS} tokens")

    def qkv(self, layer: Layer, x: torch.Tensor | None, residual: torch.Tensor, step: Step) -> torch.Tensor:
        assert step.rope is not None
        k_pages, v_pages, group = step.kv.layers[layer.index]
        qkv = self._after_norm(layer.qkv, layer.input_norm.weight, x, residual)
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
        if x is None and _few(layer.up, residual):
            norm = layer.post_norm.weight
            inner = self._small(
                residual, layer.up.state["weight"], norm=norm, eps=self._eps, gated=True, bias=layer.up.bias
            )
        else:
            inner = self.ops.act_and_mul(layer.up(self.norm(layer.post_norm, x, residual)), "silu")
        return self._into_residual(layer.down, inner, residual)

    def head(self, head: Linear, hidden: torch.Tensor) -> torch.Tensor:
        if _few(head, hidden):
            return self._small(hidden, head.state["weight"], out_dtype=torch.float32)
        return super().head(head, hidden)

    def _after_norm(
        self, linear: Linear, norm: torch.Tensor, x: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        if x is None and _few(linear, residual):
            return self._small(residual, linear.state["weight"], norm=norm, eps=self._eps, bias=linear.bias)
        if x is None:
            return linear(self.ops.rms_norm(residual, norm, self._eps))
        return linear(self.ops.add_rms_norm(x, residual, norm, self._eps))

    def _into_residual(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor | None:
        """The product, added to the residual if that costs nothing; else handed on for the next norm to add."""
        if not _few(linear, x):
            return linear(x)
        self._small(x, linear.state["weight"], residual=residual, bias=linear.bias, out=residual)
        return None


def _few(linear: Linear, x: torch.Tensor) -> bool:
    return x.shape[0] <= FEW_TOKENS and isinstance(linear.scheme, DenseScheme)
