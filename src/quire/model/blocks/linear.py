"""Modules that hold weights: a matrix kept by a quantization scheme, and plain tensors.

A `Linear` may be several matrices stacked along their outputs (q, k, v), multiplied in one go. Refuses to know: names,
layers, how a scheme keeps its numbers.
"""

from __future__ import annotations

from functools import cached_property

import torch

from quire.model.blocks.low_rank import LowRank
from quire.model.loading.stored_tensor import StoredTensor
from quire.model.quantization.dense_scheme import DenseScheme
from quire.model.quantization.scheme import QuantScheme, State


class Linear:
    """`parts` are the output sizes of the stacked matrices; `tied` is another module's tensor to use as weight."""

    def __init__(
        self,
        columns: int,
        parts: tuple[int, ...],
        *,
        bias: bool,
        scheme: QuantScheme,
        device: torch.device,
        dtype: torch.dtype,
        tied: torch.Tensor | None = None,
    ):
        self.columns = columns
        self.parts = parts
        self.scheme = scheme  # may be changed until the state is first asked for
        self.device, self.dtype = device, dtype
        self.tied = tied is not None
        if tied is not None:
            self.state = {"weight": tied}
        assert tied is None or isinstance(scheme, DenseScheme), "a table of embeddings is dense"
        self.bias = torch.empty(sum(parts), device=device, dtype=dtype) if bias else None
        self.lora: LowRank | None = None  # of all adapters, where there may be any

    @cached_property
    def state(self) -> State:
        return self.scheme.create(sum(self.parts), self.columns, self.device, self.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.scheme.apply(self.state, x, self.bias)

    def needs(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """Shapes of the stored tensors that fill it, by (kind, part)."""
        shapes: dict[tuple[str, int], tuple[int, ...]] = {}
        for part, rows in enumerate(self.parts):
            if not self.tied:
                shapes["weight", part] = (rows, self.columns)
            if self.bias is not None:
                shapes["bias", part] = (rows,)
        return shapes

    def load(self, kind: str, part: int, stored: StoredTensor) -> None:
        """From `part` on: a stored tensor may already hold several parts stacked."""
        first = sum(self.parts[:part])
        if kind == "weight":
            self.scheme.load(self.state, first, stored)
        else:
            assert self.bias is not None
            stored.copy_into(self.bias[first : first + stored.shape[0]])

    def scale(self, factors: torch.Tensor) -> None:
        """Multiply each output by a factor, a power of two: [sum(parts)]."""
        self.scheme.scale(self.state, factors)
        if self.bias is not None:
            self.bias *= factors.to(self.bias.dtype)

    def tensors(self) -> State:
        own = {} if self.tied else dict(self.state)
        if self.lora is not None:
            own |= {"lora_a": self.lora.a, "lora_b": self.lora.b}
        return own | ({} if self.bias is None else {"bias": self.bias})


class Plain:
    """Tensors used as they are: a norm's weight and bias, a table of embeddings."""

    def __init__(self, shape: tuple[int, ...], *, bias: bool = False, device: torch.device, dtype: torch.dtype):
        self.weight = torch.empty(shape, device=device, dtype=dtype)
        self.bias = torch.empty(shape, device=device, dtype=dtype) if bias else None

    def needs(self) -> dict[tuple[str, int], tuple[int, ...]]:
        return {(kind, 0): tuple(tensor.shape) for kind, tensor in self.tensors().items()}

    def load(self, kind: str, part: int, stored: StoredTensor) -> None:
        stored.copy_into(self.tensors()[kind])

    def tensors(self) -> State:
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})


Module = Linear | Plain
