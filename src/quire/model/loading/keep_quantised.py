"""Which matrices of a model stay in the 4 bits that they are stored in, where torch runs it on a GPU.

Refuses to know: how any format packs, products.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.kernels.reference.dequant import FOUR_BITS
from quire.kernels.triton import why_not
from quire.model.blocks.linear import Linear
from quire.model.decoder import Model
from quire.model.families.architecture import Target
from quire.model.quantization.int4 import Int4Scheme, keeps
from quire.types.seams import WeightSource


def can_keep(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are products of 4-bit matrices there; they take activations of 16 bits."""
    return why_not(device) is None and dtype != torch.float32


def four_bit_modules(targets: Mapping[str, Target], source: WeightSource) -> set[str]:
    """Modules whose matrices are all stored in 4 bits, in rows as they are wanted."""
    tensors = source.tensors()
    found: dict[str, bool] = {}
    for name, target in targets.items():
        if target.kind == "weight":
            same = tensors[name].kind in FOUR_BITS and not target.transposed and not target.offset
            found[target.module] = found.get(target.module, True) and same
    return {module for module, same in found.items() if same}


def keep_four_bits(model: Model, which: set[str] | None) -> None:
    """Keep these of the layers' matrices in 4 bits, or all that can be (None); before any is filled."""
    linears = {n: m for n, m in model.modules().items() if isinstance(m, Linear) and m.scheme is model.scheme}
    kept = [m for n, m in linears.items() if (which is None or n in which) and keeps(m.columns)]
    for linear in kept:
        linear.scheme = Int4Scheme()
    if kept:
        model.notes.append(
            f"weights: {len(kept)} of the layers' {len(linears)} matrices in 4 bits, others as dtype says"
        )
