"""The plainest scheme: weights in the compute dtype; quantised files are dequantised as they are loaded.

A single row takes `row_matmul`, norm and gate included; more rows the kernel that is the fastest for them
(`kernels/products.py`), which may add the residual; gate and up are joined with the SiLU where that is faster.
Refuses to know: files, layers.
"""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from quire.kernels import products
from quire.kernels.triton import configs
from quire.model.loading.stored_tensor import StoredTensor
from quire.model.quantization.scheme import Matrix, QuantScheme, RMSNorm, State


class DenseScheme:
    name = "dense"
    fuses: tuple[str, ...] = ("norm", "gate", "residual")

    def create(self, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> State:
        return {"weight": torch.empty(rows, columns, device=device, dtype=dtype)}

    def load(self, state: State, first_row: int, weight: StoredTensor) -> None:
        weight.copy_into(state["weight"][first_row : first_row + weight.shape[0]])

    def put(self, state: State, first_row: int, rows: torch.Tensor) -> None:
        state["weight"][first_row : first_row + rows.shape[0]] = rows

    def finish(self, state: State) -> None:
        pass

    def scale(self, state: State, factors: torch.Tensor) -> None:
        state["weight"] *= factors[:, None].to(state["weight"].dtype)

    def invariant(self) -> QuantScheme:
        return InvariantDenseScheme()

    def apply(self, state: State, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, state["weight"], bias)

    def apply_each(self, state: State, x: torch.Tensor, ends: torch.Tensor, count: int) -> torch.Tensor:
        """Of `count` matrices one below the other, each times its rows of x; those of matrix i end before ends[i]."""
        weight = state["weight"].unflatten(0, (count, -1))
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends.to(torch.int32))

    @cached_property
    def kernels(self) -> SimpleNamespace:
        """Imported here, because they need Triton."""
        from quire.kernels.triton import gemm, gemv, triton_ops

        return SimpleNamespace(gemm=gemm, gemv=gemv, ops=triton_ops)

    def product(
        self,
        linear: Matrix,
        x: torch.Tensor | None,
        residual: torch.Tensor | None = None,
        *,
        norm: RMSNorm | None = None,
        gate: bool = False,
    ) -> torch.Tensor | None:
        weight, kernels, bias = linear.state["weight"], self.kernels, linear.bias
        if norm is not None:
            assert residual is not None
            if x is None and single_row(linear, residual):
                return kernels.gemv.row_matmul(residual, weight, norm=norm.weight, eps=norm.eps, gated=gate)
            if x is None:
                x = kernels.ops.rms_norm(residual, norm.weight, norm.eps)
            else:
                x = kernels.ops.add_rms_norm(x, residual, norm.weight, norm.eps)
            residual = None
            if gate and (config := joined_gate(linear, x)) is not None:
                return kernels.gemm.gated_matmul(x, weight, config)
        assert x is not None
        if x.shape[1] != linear.columns:
            x = kernels.ops.act_and_mul(x, "silu")
        if bias is not None:
            return F.linear(x, weight, bias)
        if residual is not None and single_row(linear, x):
            kernels.gemv.row_matmul(x, weight, residual=residual, out=residual)
            return None
        out = products.matmul(x, weight, residual=residual)
        return None if out is residual else out


class InvariantDenseScheme(DenseScheme):
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
        x, weight = invariant_input(self.kernels.ops, linear, x, residual, norm), linear.state["weight"]
        out = self.kernels.gemm.matmul(x.contiguous(), weight, configs.INVARIANT_MATMUL[weight.element_size()])
        return out if linear.bias is None else out.add_(linear.bias)


def invariant_input(
    ops: SimpleNamespace, linear: Matrix, x: torch.Tensor | None, residual: torch.Tensor | None, norm: RMSNorm | None
) -> torch.Tensor:
    """What is multiplied, in kernels of its own."""
    if norm is not None:
        assert residual is not None
        if x is None:
            return ops.rms_norm(residual, norm.weight, norm.eps)
        return ops.add_rms_norm(x, residual, norm.weight, norm.eps)
    assert x is not None
    return x if x.shape[1] == linear.columns else ops.act_and_mul(x, "silu")


def single_row(linear: Matrix, x: torch.Tensor) -> bool:
    """Whether the product with x is one for `row_matmul`."""
    if x.shape[0] > configs.ROW_MATMUL_ROWS or linear.bias is not None:
        return False
    element = linear.state["weight"].element_size()
    return all(configs.row_matmul(part, linear.columns, element) is not None for part in linear.parts)


def joined_gate(linear: Matrix, x: torch.Tensor) -> configs.Matmul | None:
    """How the product with x takes the gate along, if it does."""
    return products.joined_gate(x, linear.state["weight"]) if linear.bias is None else None
