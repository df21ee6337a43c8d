"""Weights in 8-bit floats (e4m3) with a scale per output, multiplied with activations quantised per token.

Half the bytes and twice the arithmetic of bf16 on a GPU that has 8-bit matrix units. Refuses to know: files, layers.
"""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace

import torch

from quire.kernels import products
from quire.kernels.reference import fp8_rows
from quire.kernels.triton import configs
from quire.model.loading.stored_tensor import StoredTensor
from quire.model.quantization.dense_scheme import invariant_input, joined_gate, single_row
from quire.model.quantization.scheme import Matrix, QuantScheme, RMSNorm, State


class Fp8Scheme:
    name = "fp8"
    fuses: tuple[str, ...] = ("norm", "gate", "residual")

    def create(self, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> State:
        return {
            "weight": torch.empty(rows, columns, device=device, dtype=torch.float8_e4m3fn),
            "scale": torch.empty(rows, device=device, dtype=torch.float32),
        }

    def load(self, state: State, first_row: int, weight: StoredTensor) -> None:
        rows = torch.empty(weight.shape, device=state["weight"].device, dtype=torch.bfloat16)
        weight.copy_into(rows)
        self.put(state, first_row, rows)

    def put(self, state: State, first_row: int, rows: torch.Tensor) -> None:
        """With the scale of each row by which it loses least."""
        place = slice(first_row, first_row + rows.shape[0])
        scale = self.kernels.scales(rows) if rows.is_cuda else fp8_rows.row_scales(rows)
        state["scale"][place] = scale
        state["weight"][place] = (rows.float() / scale[:, None]).to(torch.float8_e4m3fn)

    def finish(self, state: State) -> None:
        pass

    def scale(self, state: State, factors: torch.Tensor) -> None:
        state["scale"] *= factors

    def invariant(self) -> QuantScheme:
        return InvariantFp8Scheme()

    @cached_property
    def kernels(self) -> SimpleNamespace:
        """Imported here, because they need Triton."""
        from quire.kernels.triton import activation, fp8_scales, gemm, gemv, norm, triton_ops

        return SimpleNamespace(
            gemm=gemm, gemv=gemv, ops=triton_ops, quantise=activation.quantise_fp8, norm=norm.rms_norm_fp8,
            scales=fp8_scales.row_scales,
        )  # fmt: skip

    def apply(self, state: State, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        eight, scales = self.kernels.quantise(x)
        return self.multiply(state, eight, scales, bias)

    def product(
        self,
        linear: Matrix,
        x: torch.Tensor | None,
        residual: torch.Tensor | None = None,
        *,
        norm: RMSNorm | None = None,
        gate: bool = False,
    ) -> torch.Tensor | None:
        """Norm and gate come out in 8 bits."""
        state, kernels = linear.state, self.kernels
        if norm is not None:
            assert residual is not None
            if x is None and single_row(linear, residual):
                return kernels.gemv.row_matmul(
                    residual, state["weight"], weight_scale=state["scale"], norm=norm.weight, eps=norm.eps, gated=gate
                )
            first, second = (residual, None) if x is None else (x, residual)
            eight, scales = kernels.norm(first, second, norm.weight, norm.eps)
            if gate and (config := joined_gate(linear, eight)) is not None:
                return kernels.gemm.gated_matmul(
                    eight, state["weight"], config,
                    x_scale=scales, weight_scale=state["scale"], out_dtype=torch.bfloat16,
                )  # fmt: skip
            return self.multiply(state, eight, scales, linear.bias)
        assert x is not None
        gated = x.shape[1] != linear.columns
        if residual is not None and not gated and single_row(linear, x):
            kernels.gemv.row_matmul(x, state["weight"], weight_scale=state["scale"], residual=residual, out=residual)
            return None
        eight, scales = kernels.quantise(x, gated=gated)
        out = self.multiply(state, eight, scales, linear.bias, residual)
        return None if out is residual else out

    def multiply(
        self, state: State, x: torch.Tensor, x_scale: torch.Tensor, bias: torch.Tensor | None,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """x already in 8 bits, [tokens, columns] with a scale a token → bf16 [tokens, rows]. Where that costs nothing
        it is added to `into`, which is then what is returned."""
        into = into if bias is None else None
        out = products.matmul(x, state["weight"], residual=into, scales=(x_scale, state["scale"]))
        return out if bias is None else out + bias


class InvariantFp8Scheme(Fp8Scheme):
    """Every product by one tiling of one kernel."""

    fuses: tuple[str, ...] = ()

    def product(
        self,
        linear: Matrix,
        x: torch.Tensor | None,
        residual: torch.Tensor | None = None,
        *,
        norm: RMSNorm | None = None,
        gate: bool = False,
    ) -> torch.Tensor | None:
        x, x_scale = self.kernels.quantise(invariant_input(self.kernels.ops, linear, x, residual, norm))
        out = self.kernels.gemm.matmul(
            x.contiguous(), linear.state["weight"], configs.INVARIANT_MATMUL[1],
            x_scale=x_scale, weight_scale=linear.state["scale"], out_dtype=torch.bfloat16,
        )  # fmt: skip
        return out if linear.bias is None else out.add_(linear.bias)
