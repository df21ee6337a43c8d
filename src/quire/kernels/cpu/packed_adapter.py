"""LoRA adapters, packed for the compiled kernels. Refuses to know: names of tensors, which requests have them."""

from __future__ import annotations

import torch

from quire.kernels.cpu.matrix_packing import PackedMatrix, Store
from quire.kernels.cpu.structs import AdapterLayer, LowRank

Update = tuple[torch.Tensor, torch.Tensor]  # A [rank, columns], B [rows, rank]


class PackedAdapter:
    """A LoRA adapter, packed to 8 bits as weights are: every A and B scaled to numbers around one, for their blocks'
    scales are fp16, and by how much lies beside them. Rows of B are padded to `rank`."""

    def __init__(self, layers: list[dict[str, Update]], rank: int):
        self.layers = (AdapterLayer * len(layers))()
        self.updates: dict[tuple[int, str], tuple[PackedMatrix, PackedMatrix, float]] = {}  # A, B, and their scale
        pairs = [pair for layer in layers for pair in layer.values()]
        sizes = [size for a, b in pairs for size in ((a.shape[0], a.shape[1]), (b.shape[0], rank))]
        store = Store(sum(Store.needs(rows, columns, "F32") for rows, columns in sizes))
        for index, layer in enumerate(layers):
            for name, (a, b) in layer.items():
                padded = torch.nn.functional.pad(b, (0, rank - b.shape[1]))
                (packed_a, scale_a), (packed_b, scale_b) = (_normalised(store, each) for each in (a, padded))
                self.updates[index, name] = packed_a, packed_b, scale_a * scale_b
                setattr(self.layers[index], name, LowRank(packed_a.struct, packed_b.struct, scale_a * scale_b))


def _normalised(store: Store, numbers: torch.Tensor) -> tuple[PackedMatrix, float]:
    most = numbers.abs().max().item() or 1.0
    packed = PackedMatrix(store, numbers.shape[0], numbers.shape[1], "F32")
    packed.fill((numbers.float() / most).contiguous().view(torch.uint8))
    return packed, most
