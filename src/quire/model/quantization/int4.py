"""Weights in 4 bits with a scale and a zero a group of columns, multiplied with activations as they are (W4A16).

A quarter of the bytes of bf16: what published 4-bit checkpoints and 4-bit GGUF files become on a GPU, and what plain
weights may be rounded to on load. Refuses to know: files, layers.
"""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from quire.kernels.reference.dequant import FOUR_BITS, four_bit_blocks
from quire.kernels.reference.int4_words import CHUNK, packed, unpacked
from quire.model.loading.stored_tensor import SLICE, StoredTensor
from quire.model.quantization.scheme import Matrix, QuantScheme, RMSNorm, State
from quire.types.errors import ConfigError

BLOCK = 32  # columns that have a scale of their own until `finish` finds which share one
GROUP = CHUNK  # of what is rounded here
WHOLE = 0.02  # nearer to a whole number than this, a zero is one: what is left is the rounding of 16 bits


def keeps(columns: int) -> bool:
    """Whether a matrix of so many columns can be kept so."""
    return columns % CHUNK == 0


class Int4Scheme:
    name = "int4"
    fuses: tuple[str, ...] = ("residual",)

    def create(self, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> State:
        blocks = columns // BLOCK
        return {
            "weight": torch.empty(columns // CHUNK, rows, CHUNK // 4, device=device, dtype=torch.int16),
            "scale": torch.empty(blocks, rows, device=device, dtype=torch.float16),
            "zero": torch.empty(blocks, rows, device=device, dtype=torch.float16),
        }

    def load(self, state: State, first_row: int, weight: StoredTensor) -> None:
        rows, device = weight.rows(), state["weight"].device
        if weight.info.kind not in FOUR_BITS:
            plain = torch.empty(weight.shape, device=device, dtype=torch.bfloat16)
            weight.copy_into(plain)
            self.put(state, first_row, plain)
            return
        step = max(1, SLICE // weight.shape[1])
        for first in range(0, len(rows), step):
            numbers, scale, low = four_bit_blocks(rows[first : first + step].to(device), weight.info.kind)
            self._keep(state, first_row + first, numbers, *_zeros(scale, low, numbers))

    def put(self, state: State, first_row: int, rows: torch.Tensor) -> None:
        """Rounded to the nearest of 16 steps between the least and the largest number of each group."""
        groups = rows.float().unflatten(1, (-1, GROUP))
        low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
        scale = ((high - low) / 15).clamp_(min=1e-6).half().float()
        zero = (-low / scale).round_().clamp_(0, 15)
        numbers = (groups / scale.unsqueeze(-1)).round_().add_(zero.unsqueeze(-1)).clamp_(0, 15)
        wide = GROUP // BLOCK
        self._keep(
            state, first_row, numbers.flatten(1), scale.repeat_interleave(wide, 1), zero.repeat_interleave(wide, 1)
        )

    def _keep(
        self, state: State, first_row: int, numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
    ) -> None:
        place = slice(first_row, first_row + numbers.shape[0])
        state["weight"][:, place] = packed(numbers)
        state["scale"][:, place] = scale.t()
        state["zero"][:, place] = zero.t()

    def finish(self, state: State) -> None:
        """Scales and zeros that are the same in neighbouring blocks, once; zeros that are whole numbers, in 8 bits."""
        scale, zero = state["scale"], state["zero"]
        while scale.shape[0] % 2 == 0 and all(torch.equal(t[::2], t[1::2]) for t in (scale, zero)):
            scale, zero = scale[::2], zero[::2]
        near = zero.round()
        if ((zero - near).abs() < WHOLE).all():
            zero = near.to(torch.uint8)
        state["scale"], state["zero"] = scale.contiguous(), zero.contiguous()

    def scale(self, state: State, factors: torch.Tensor) -> None:
        state["scale"] *= factors.to(state["scale"].dtype)

    def invariant(self) -> QuantScheme:
        raise ConfigError("invariant results are not to be had with weights of 4 bits; use dtype bfloat16 or fp8")

    @cached_property
    def kernels(self) -> SimpleNamespace:
        """Imported here, because they need Triton."""
        from quire.kernels.triton import int4_matmul, triton_ops

        return SimpleNamespace(int4=int4_matmul, ops=triton_ops)

    def apply(self, state: State, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, unpacked(*_parts(state)).to(x.dtype), bias)

    def product(
        self,
        linear: Matrix,
        x: torch.Tensor | None,
        residual: torch.Tensor | None = None,
        *,
        norm: RMSNorm | None = None,
        gate: bool = False,
    ) -> torch.Tensor | None:
        ops, int4, state = self.kernels.ops, self.kernels.int4, linear.state
        if norm is not None:
            assert residual is not None
            if x is None:
                x = ops.rms_norm(residual, norm.weight, norm.eps)
            else:
                x = ops.add_rms_norm(x, residual, norm.weight, norm.eps)
            residual = None
        assert x is not None
        if x.shape[1] != linear.columns:
            x = ops.act_and_mul(x, "silu")
        parts = _parts(state)
        tile = int4.choose_tile(x.shape[0], sum(linear.parts), parts[0].shape[0])
        if tile is None:
            weight = int4.unpack(*parts, x.dtype)
            if residual is None or linear.bias is not None:
                return F.linear(x, weight, linear.bias)
            residual.addmm_(x, weight.t())
            return None
        if linear.bias is not None:
            return int4.int4_matmul(x, *parts, tile=tile) + linear.bias
        out = int4.int4_matmul(x, *parts, tile=tile, residual=residual, out=residual)
        return out if residual is None else None


def _parts(state: State) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return state["weight"], state["scale"], state["zero"]


def _zeros(scale: torch.Tensor, low: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, zero) of blocks that are numbers * scale + low. Where the scale is nothing, all numbers are `low`: they
    become zeros, in place, a step below which `low` lies."""
    flat = scale.abs() < 1e-7
    numbers.unflatten(1, (-1, BLOCK)).masked_fill_(flat.unsqueeze(-1), 0)
    steps = torch.where(flat, -low, scale)
    return steps, torch.where(flat, 1.0, -low / torch.where(flat, 1.0, scale))
