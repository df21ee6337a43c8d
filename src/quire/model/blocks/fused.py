"""Stages on a GPU: Triton kernels that join what plain torch does in several launches.

    qkv:  add + norm ─► product ─► norm heads, rotate, write K and V        attend:  attention ─► product (+ residual)
    mlp:  add + norm ─► product ─► SiLU * up ─► product (+ residual)

Products belong to cuBLAS, which also adds the residual, except those of few rows: a single row takes `row_matmul`, norm
and gate included, others `small_matmul` where `configs` has a tiling for it; and gate and up, which are joined with the
SiLU where that is faster. `InvariantStages` use one tiling for everything instead. Refuses to know: graphs.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.kernels.library import cublas
from quire.kernels.triton import configs, why_not
from quire.kernels.triton.configs import Matmul
from quire.model.blocks.stages import Layer, Stages, Step
from quire.model.decoder_spec import DecoderSpec
from quire.model.quantization.fp8 import Fp8Scheme
from quire.model.quantization.scheme import DenseScheme, Linear, Plain
from quire.types.errors import ConfigError


def choose_stages(spec: DecoderSpec, device: torch.device, *, invariant: bool = False) -> Stages:
    """Fused stages where they can run, plain ones elsewhere; `reasons` says which. `invariant`: a row's bits may not
    depend on what runs beside it."""
    refusal = why_not(device)
    if refusal is None and (spec.norm != "rms" or spec.rope is None or not spec.gated_mlp or spec.activation != "silu"):
        refusal = f"{spec.architecture} is not made of RMS norms, rotary positions and SwiGLU"
    if refusal is None:
        return InvariantStages(spec, device) if invariant else FusedStages(spec, device)
    if invariant:
        raise ConfigError(f"invariant results come from the Triton kernels, which cannot run here: {refusal}")
    stages = Stages(spec, device)
    stages.reasons.append(f"stages: plain torch, not fused: {refusal}")
    return stages


class FusedStages(Stages):
    kv_kinds = ("float8_e4m3fn", "int8", "fp8")

    def __init__(self, spec: DecoderSpec, device: torch.device):
        super().__init__(spec, device)
        from quire.kernels.triton import activation, gemm, gemv, norm
        from quire.kernels.triton import rope_kernel as rope

        self._gemm, self._gemv, self._rope_and_write = gemm, gemv, rope.rope_and_write
        self._quantise, self._norm_fp8 = activation.quantise_fp8, norm.rms_norm_fp8
        self._tiles = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9
        choice = "measured for their shape" if cublas.measured(device) else "that the library prefers"
        self.reasons.append(f"stages: Triton kernels between products of cuBLAS, by kernels {choice}")

    def qkv(self, layer: Layer, x: torch.Tensor | None, residual: torch.Tensor, step: Step) -> torch.Tensor:
        assert step.rope is not None
        kv = step.kv.layers[layer.index]
        if x is None and self._single(layer.qkv, residual):
            qkv = self._row(layer.qkv, residual, norm=layer.input_norm.weight, eps=self._eps)
        else:
            qkv = self._product(layer.qkv, layer.input_norm, x, residual)
        return self._rope_and_write(
            qkv,
            layer.attention.heads,
            *step.rope,
            kv,
            step.batch.groups[kv.group].kv_slots,
            q_norm=layer.q_norm.weight if layer.q_norm is not None else None,
            k_norm=layer.k_norm.weight if layer.k_norm is not None else None,
            eps=self._eps,
        )

    def attend(self, layer: Layer, q: torch.Tensor, residual: torch.Tensor, step: Step) -> torch.Tensor | None:
        return self._into_residual(layer.o, self.attention(layer, q, step).flatten(1), residual)

    def mlp(self, layer: Layer, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor | None:
        if x is None and self._single(layer.up, residual):
            gated = self._row(layer.up, residual, norm=layer.post_norm.weight, eps=self._eps, gated=True)
            return self._into_residual(layer.down, gated, residual)
        config = self._joined(layer.up, residual)
        up = self._product(layer.up, layer.post_norm, x, residual, config)
        if isinstance(layer.down.scheme, Fp8Scheme):
            return self._add_fp8(layer.down, self._quantise(up, gated=config is None), residual)
        return self._into_residual(layer.down, up if config else self.ops.act_and_mul(up, "silu"), residual)

    def _product(
        self, linear: Linear, norm: Plain, x: torch.Tensor | None, residual: torch.Tensor, gated: Matmul | None = None
    ) -> torch.Tensor:
        """residual += x, its norm, and the product with it, through the gate where there is a config for that; an 8-bit
        product's norm comes out in 8 bits."""
        weight = linear.state["weight"]
        if not isinstance(linear.scheme, Fp8Scheme):
            normed = self.norm(norm, x, residual)
            return self._gemm.gated_matmul(normed, weight, gated) if gated else self._multiply(linear, normed)
        first, second = (residual, None) if x is None else (x, residual)
        normed, scales = self._norm_fp8(first, second, norm.weight, self._eps)
        if not gated:
            return linear.scheme.multiply(linear.state, normed, scales, linear.bias)
        return self._gemm.gated_matmul(
            normed, weight, gated, x_scale=scales, weight_scale=linear.state["scale"], out_dtype=torch.bfloat16
        )

    def _into_residual(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor | None:
        """The product, added to the residual where that costs nothing; else handed on for the next norm to add."""
        if self._single(linear, x):
            self._row(linear, x, residual=residual, out=residual)
        elif isinstance(linear.scheme, Fp8Scheme):
            return self._add_fp8(linear, self._quantise(x), residual)
        elif not isinstance(linear.scheme, DenseScheme) or linear.bias is not None:
            return linear(x)
        else:
            self._dense(linear.state["weight"], x, residual)
        return None

    def _add_fp8(
        self, linear: Linear, x: tuple[torch.Tensor, torch.Tensor], residual: torch.Tensor
    ) -> torch.Tensor | None:
        """As `_into_residual`, of numbers in 8 bits and their scales."""
        assert isinstance(linear.scheme, Fp8Scheme)
        out = linear.scheme.multiply(linear.state, *x, linear.bias, residual)
        return None if out is residual else out

    def head(self, head: Linear, hidden: torch.Tensor) -> torch.Tensor:
        return self._multiply(head, hidden)

    def _multiply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(linear.scheme, DenseScheme) or linear.bias is not None:
            return linear(x)
        return self._dense(linear.state["weight"], x)

    def _dense(self, weight: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The product, added to the residual where there is one."""
        out = cublas.matmul(x, weight, residual=residual)
        if out is not None:
            return out
        if configs.small_matmul(x.element_size(), x.shape[0], *weight.shape) is not None:
            return self._gemv.small_matmul(x, weight, residual=residual, out=residual)
        return torch.nn.functional.linear(x, weight) if residual is None else residual.addmm_(x, weight.t())

    def _joined(self, linear: Linear, x: torch.Tensor) -> Matmul | None:
        """How the product with x takes the gate along, if it does: on chips that move tiles by themselves."""
        if not isinstance(linear.scheme, DenseScheme | Fp8Scheme) or linear.bias is not None or not self._tiles:
            return None
        weight = linear.state["weight"]
        return configs.gated_matmul(weight.element_size(), x.shape[0], *weight.shape)

    def _single(self, linear: Linear, x: torch.Tensor) -> bool:
        """Whether the product with x is one for `row_matmul`."""
        few = x.shape[0] <= self._gemv.ROW_MATMUL and linear.bias is None
        return few and configs.row_matmul(min(linear.parts), linear.columns) is not None

    def _row(self, linear: Linear, x: torch.Tensor, **options: Any) -> torch.Tensor:
        state = linear.state
        return self._gemv.row_matmul(x, state["weight"], weight_scale=state.get("scale"), **options)


class InvariantStages(FusedStages):
    """Every product by one tiling of one kernel, every attention by one split of the keys."""

    invariant = True

    def __init__(self, spec: DecoderSpec, device: torch.device):
        super().__init__(spec, device)
        self.reasons[-1] = "stages: Triton kernels of one tiling for any batch: slower, the same bits in all of them"

    def attend(self, layer: Layer, q: torch.Tensor, residual: torch.Tensor, step: Step) -> torch.Tensor:
        return self._multiply(layer.o, self.attention(layer, q, step).flatten(1))

    def mlp(self, layer: Layer, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        up = self._product(layer.up, layer.post_norm, x, residual)
        return self._multiply(layer.down, self.ops.act_and_mul(up, "silu"))

    def _single(self, linear: Linear, x: torch.Tensor) -> bool:
        return False

    def _product(
        self, linear: Linear, norm: Plain, x: torch.Tensor | None, residual: torch.Tensor, gated: Matmul | None = None
    ) -> torch.Tensor:
        return self._multiply(linear, self.norm(norm, x, residual))

    def _multiply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        weight = linear.state["weight"]
        scales: dict[str, Any] = {}
        config = configs.INVARIANT_MATMUL[weight.element_size()]
        if isinstance(linear.scheme, Fp8Scheme):
            x, x_scale = self._quantise(x)
            scales = {"x_scale": x_scale, "weight_scale": linear.state["scale"], "out_dtype": torch.bfloat16}
        out = self._gemm.matmul(x.contiguous(), weight, config, **scales)
        return out if linear.bias is None else out.add_(linear.bias)
