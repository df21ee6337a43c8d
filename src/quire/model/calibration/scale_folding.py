"""Scales that move difficulty between a matrix and what comes before it, leaving the layer's function as it is: the
columns of a matrix are multiplied, what makes their inputs is divided.

    norm ─► qkv,  norm ─► gate and up (of all experts, and their router),  values ─► o,  up ─► down (of one MLP)

AWQ searches scales by which the outputs of rounded matrices err least; SmoothQuant balances the largest inputs against
the largest weights, behind norms. Refuses to know: names, files, how numbers are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from quire.model.blocks.attention import AttentionBlock
from quire.model.blocks.dense import DenseBlock
from quire.model.blocks.experts import ExpertsBlock
from quire.model.blocks.linear import Linear
from quire.model.blocks.norms import Norm
from quire.model.calibration.observed_inputs import ObservedInputs
from quire.model.calibration.weight_rounding import Rounded
from quire.model.decoder import Layer

RATIOS = tuple(step / 20 for step in range(20))
Round = Callable[[torch.Tensor], Rounded]
Seen = Mapping[int, list[ObservedInputs]]  # by a linear's id: by its matrices


@dataclass
class Fold:
    """`readers` share inputs, which `norm` makes, or the rows from `first` on of `maker`: each of `repeat` runs of
    columns of `width` for a run of rows."""

    readers: list[Linear]
    norm: Norm | None = None
    maker: Linear | None = None
    first: int = 0
    repeat: int = 1
    width: int = 1

    def reduced(self, values: torch.Tensor) -> torch.Tensor:
        """One of each that can be scaled on its own, [columns] → [columns / repeat]."""
        return values.view(-1, self.repeat, self.width).mean(1).flatten() if self.repeat > 1 else values

    def by_column(self, scales: torch.Tensor) -> torch.Tensor:
        if self.repeat == 1:
            return scales
        return scales.view(-1, 1, self.width).expand(-1, self.repeat, -1).flatten()

    def apply(self, scales: torch.Tensor, keep: Callable[[Norm, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Divide what makes the inputs, multiply the columns. `keep`: a norm's weights as they will be stored. Returns
        what inputs were divided by, [columns]."""
        if self.norm is not None:
            before = self.norm.weight.clone()
            self.norm.weight.copy_(keep(self.norm, before / scales))
            # what rounding the norm's weights did is made up for
            scales = torch.where(self.norm.weight != 0, before / self.norm.weight, scales)
            if self.norm.bias is not None:
                self.norm.bias /= scales
        if self.maker is not None:
            rows = slice(self.first, self.first + len(scales))
            self.maker.state["weight"][rows] /= scales[:, None]
            if self.maker.bias is not None:
                self.maker.bias[rows] /= scales
        wide = self.by_column(scales)
        for reader in self.readers:
            reader.state["weight"] *= wide
        return wide


def folds(layer: Layer) -> list[Fold]:
    """Of a layer with attention and an MLP or experts: wherever nothing but a multiplication lies between."""
    mixer, feed = layer.mixer, layer.feed
    assert isinstance(mixer, AttentionBlock) and isinstance(feed, DenseBlock | ExpertsBlock)
    found = []
    readers = [feed.up]
    if isinstance(feed, ExpertsBlock):  # the first sees all that comes
        others = (feed.router, feed.up, feed.shared_up, feed.shared_gate)
        readers = [linear for linear in others if linear is not None]
    if mixer.norm is not None:
        found.append(Fold([mixer.qkv, *(readers if feed.norm is mixer.norm else [])], norm=mixer.norm))
    if feed.norm is not None and feed.norm is not mixer.norm:
        found.append(Fold(readers, norm=feed.norm))
    if not mixer.gated:
        heads, dim = mixer.attention.heads, mixer.attention.head_dim
        kv_heads = mixer.attention.kv_heads
        first = sum(mixer.qkv.parts[:-1])
        found.append(Fold([mixer.o], maker=mixer.qkv, first=first, repeat=heads // kv_heads, width=dim))
    if isinstance(feed, DenseBlock) and feed.gated:
        found.append(Fold([feed.down], maker=feed.up, first=feed.up.parts[0]))
    return found


def awq_scales(fold: Fold, seen: Seen, rounding: Mapping[int, Round]) -> torch.Tensor | None:
    """The power of the inputs' mean size by which rounded outputs err least; None: no scale does better."""
    inputs = seen[id(fold.readers[0])][0]
    size = fold.reduced(inputs.mean_size).clamp(min=1e-4)
    best, least = None, float("inf")
    for ratio in RATIOS:
        scales = size**ratio
        scales = (scales / (scales.max() * scales.min()).sqrt()).clamp(min=1e-4)
        wide, cost = fold.by_column(scales), 0.0
        for reader in fold.readers:
            if id(reader) not in rounding:
                continue
            weight = reader.state["weight"]
            error = rounding[id(reader)](weight * wide).dense() / wide - weight
            cost += float((error @ inputs.gram * error).sum())
        if cost < least:
            best, least = (scales if ratio else None), cost
    return best


def smooth_scales(fold: Fold, seen: Seen, alpha: float) -> torch.Tensor | None:
    if fold.norm is None:
        return None
    inputs = seen[id(fold.readers[0])][0].largest.clamp(min=1e-5)
    weights = torch.stack([reader.state["weight"].abs().amax(0) for reader in fold.readers]).amax(0).clamp(min=1e-5)
    return (inputs**alpha / weights ** (1 - alpha)).clamp(min=1e-5)
