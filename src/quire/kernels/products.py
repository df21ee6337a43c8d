"""Products of plain and of 8-bit matrices on a GPU, each by the kernel that was measured for its shape, else by rules.

    out [rows, n] = x [rows, k] · weight [n, k]ᵀ (+ residual)

Refuses to know: layers, norms, how choices are come by.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from quire.kernels.library import cublas
from quire.kernels.library.cublas import Algorithm
from quire.kernels.product_choices import LIBRARY, Choice, Shape, choices
from quire.kernels.triton import configs, moves_tiles
from quire.kernels.triton.configs import Matmul

Scales = tuple[torch.Tensor, torch.Tensor]  # of x, one a row, and of the weight, one an output


def matmul(
    x: torch.Tensor, weight: torch.Tensor, *, residual: torch.Tensor | None = None, scales: Scales | None = None
) -> torch.Tensor:
    """Where that costs nothing it is added to `residual`, which is then returned. With `scales`, of 8 bits, bf16 comes
    out."""
    shape = shape_of(x, weight)
    found = choices(x.device).find(shape, adds=residual is not None)
    out = None if found is None else multiply(found, x, weight, residual, scales)
    if out is None:
        out = multiply(usual(shape), x, weight, residual, scales)
        assert out is not None
    return out


def shape_of(x: torch.Tensor, weight: torch.Tensor, *, gated: bool = False) -> Shape:
    outputs, width = weight.shape
    return Shape(weight.element_size(), outputs, width, x.shape[0], gated)


def usual(shape: Shape) -> Choice:
    """What is the fastest as a rule."""
    element, outputs, width, rows, gated = shape
    if gated:
        return configs.gated_matmul(element, rows, outputs, width) or LIBRARY
    if few := configs.small_matmul(element, rows, outputs, width):
        return few
    return (configs.fp8_matmul(rows, outputs) if element == 1 else None) or LIBRARY


def multiply(
    choice: Choice,
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    scales: Scales | None = None,
) -> torch.Tensor | None:
    """By this kernel; None: there is none such for the product."""
    if isinstance(choice, Algorithm):
        return cublas.matmul(x, weight, choice, residual=residual, scales=scales)
    if isinstance(choice, Matmul):
        return _by_triton(choice, x, weight, residual, scales)
    if scales is None:
        return F.linear(x, weight) if residual is None else residual.addmm_(x, weight.t())
    return torch._scaled_mm(
        x,
        weight.t(),
        scale_a=scales[0][:, None],
        scale_b=scales[1][None],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,  # a tenth of what quantising costs in accuracy, a sixth of the time
    )


def _by_triton(
    config: Matmul, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, scales: Scales | None
) -> torch.Tensor:
    from quire.kernels.triton import gemm, gemv  # they need Triton

    eight: dict[str, Any] = {}
    if scales is not None:
        eight = {"x_scale": scales[0], "weight_scale": scales[1], "out_dtype": torch.bfloat16}
    if config.persistent:
        return gemm.matmul(x, weight, config, **eight)
    return gemv.small_matmul(x, weight, config=config, residual=residual, out=residual, **eight)


def joined_gate(x: torch.Tensor, weight: torch.Tensor) -> Matmul | None:
    """How the product of gate and up takes the SiLU along, if it does: on chips that move tiles by themselves."""
    if not moves_tiles(x.device):
        return None
    shape = shape_of(x, weight, gated=True)
    found = choices(x.device).find(shape) or usual(shape)
    return found if isinstance(found, Matmul) else None
