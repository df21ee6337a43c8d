"""Linear layers of small torch networks in 8 bits, through the compiled kernels: a quarter of the bytes to read, and a
few rows for the price of one. On the calling thread.

Refuses to know: what the networks are for.
"""

from __future__ import annotations

import torch
from torch import nn

from quire.kernels.cpu.matrix_packing import PackedMatrix, Store


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        rows, columns = linear.weight.shape
        self._matrix = PackedMatrix(Store(Store.needs(rows, columns, "F32")), rows, columns, "F32")
        self._matrix.fill(linear.weight.detach().float().contiguous().view(torch.uint8))
        self._bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._matrix.linear(x.reshape(-1, x.shape[-1])).unflatten(0, x.shape[:-1])
        return out if self._bias is None else out + self._bias


def pack_linears(network: nn.Module) -> None:
    """Every linear layer of a network that the kernels can take, in place."""
    for name, child in network.named_children():
        if isinstance(child, nn.Linear) and child.in_features % 32 == 0:
            setattr(network, name, PackedLinear(child))
        else:
            pack_linears(child)
