"""LoRA of many adapters in one batch, in plain torch: tokens sorted by adapter, every run times its own matrices.

    x ──► A of the token's adapter, all parts ──► [parts x rank] ──► B of each part ──► added to the base's outputs

Slot 0 is no adapter: its matrices are zeros. Twin: `triton/lora_kernels.py`. Refuses to know: layers, names.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Segments(NamedTuple):
    order: torch.Tensor  # [tokens]: tokens sorted by adapter
    ends: torch.Tensor  # int32 [slots]: where each adapter's run ends among them


def segments(adapters: torch.Tensor, slots: int) -> Segments:
    """Of a step's tokens, by the adapter slot of each; once for all layers."""
    ordered, order = adapters.sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(slots, device=adapters.device), right=True)
    return Segments(order, ends.int())


def add_lora(
    out: torch.Tensor,  # [tokens, sum(parts)]
    x: torch.Tensor,  # [tokens, columns]
    a: torch.Tensor,  # [slots, len(parts) * rank, columns]
    b: torch.Tensor,  # [slots, sum(parts), rank]
    parts: tuple[int, ...],
    found: Segments,
) -> None:
    """out += B A x of each token's adapter, part by part."""
    low = F.grouped_mm(x[found.order], a.transpose(1, 2), offs=found.ends).split(b.shape[2], dim=1)
    added = [
        F.grouped_mm(each, rows.transpose(1, 2), offs=found.ends)
        for each, rows in zip(low, b.split(parts, dim=1), strict=True)
    ]
    out.index_add_(0, found.order, torch.cat(added, dim=1) if len(added) > 1 else added[0])
