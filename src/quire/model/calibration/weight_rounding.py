"""A matrix rounded to integers or 8-bit floats with a scale (and a zero) for each group of a row: to the nearest, with
clipped ranges (AWQ), or column by column with what rounding costs made up for by later ones (GPTQ).

`gram` is the sum of x x^T over the inputs a matrix has seen: the error of its outputs for an error D of its weights is
tr(D gram D^T). Refuses to know: names, layers, files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels.reference.fp8_rows import row_scales
from quire.types.errors import QuireError

SMALLEST = 1e-8
FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
DAMPING = 0.01  # of the mean of the gram's diagonal
BLOCK = 128  # columns that GPTQ does before it updates those behind them
SHRINKS = tuple(1 - step / 20 for step in range(11))  # of a range, AWQ: down to a half


@dataclass
class Rounded:
    """weight[r, c] = (numbers[r, c] - zeros[r, g]) * scales[r, g]; 8-bit floats have no zeros."""

    numbers: torch.Tensor  # [rows, columns] uint8, or float8
    scales: torch.Tensor  # [rows, groups] float32, of values that `scale_dtype` has
    zeros: torch.Tensor | None  # [rows, groups] uint8
    group: int

    def dense(self) -> torch.Tensor:
        runs = self.numbers.float().unflatten(1, (-1, self.group))
        if self.zeros is not None:
            runs = runs - self.zeros.float().unsqueeze(-1)
        return (runs * self.scales.unsqueeze(-1)).flatten(1)

    def rows(self, which: torch.Tensor) -> Rounded:
        numbers = self.numbers.view(torch.uint8)[which].view(self.numbers.dtype)  # not all can be gathered
        return Rounded(numbers, self.scales[which], None if self.zeros is None else self.zeros[which], self.group)


@dataclass(frozen=True)
class Grid:
    """What numbers may become."""

    bits: int
    symmetric: bool
    group: int
    scale_dtype: torch.dtype  # what scales are stored in

    @property
    def largest(self) -> int:
        return (1 << self.bits) - 1

    def fit(self, runs: torch.Tensor, shrink: float | torch.Tensor = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zeros, [...], for runs [..., group] of numbers."""
        low, high = (end * shrink for end in runs.aminmax(dim=-1))
        if self.symmetric:
            scales = torch.maximum(-low, high) * 2 / self.largest
            zeros = torch.full_like(scales, 1 << (self.bits - 1))
        else:
            scales = (high.clamp(min=0) - low.clamp(max=0)) / self.largest
            zeros = torch.zeros_like(scales)
        scales = scales.clamp(min=SMALLEST).to(self.scale_dtype).float()
        if not self.symmetric:
            zeros = (-low.clamp(max=0) / scales).round_().clamp_(0, self.largest)
        return scales, zeros

    def search(self, runs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zeros of the ranges, shrunk or not, whose errors squared, by `weights` [..., group], add up to
        least."""
        found = self.fit(runs)
        least = torch.full(runs.shape[:-1], float("inf"), device=runs.device)
        for shrink in SHRINKS:
            scales, zeros = self.fit(runs, shrink)
            wide = scales.unsqueeze(-1), zeros.unsqueeze(-1)
            cost = (((self.round(runs, *wide) - wide[1]) * wide[0] - runs).square() * weights).sum(-1)
            better = cost < least
            least = torch.where(better, cost, least)
            found = (torch.where(better, scales, found[0]), torch.where(better, zeros, found[1]))
        return found

    def round(self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        return (values / scales + zeros).round_().clamp_(0, self.largest)


def nearest(weight: torch.Tensor, grid: Grid, shrink: float | torch.Tensor = 1.0) -> Rounded:
    runs = weight.unflatten(1, (-1, grid.group))
    scales, zeros = grid.fit(runs, shrink)
    numbers = grid.round(runs, scales.unsqueeze(-1), zeros.unsqueeze(-1)).flatten(1)
    return Rounded(numbers.to(torch.uint8), scales, zeros.to(torch.uint8), grid.group)


def nearest_fp8(weight: torch.Tensor, scale_dtype: torch.dtype, matter: torch.Tensor | None = None) -> Rounded:
    """With the scale of each row by which it loses least. `matter`, [columns]: what the square of an error costs."""
    scales = row_scales(weight, matter)[:, None].clamp(min=SMALLEST).to(scale_dtype).float()
    numbers = (weight / scales).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)
    return Rounded(numbers, scales, None, weight.shape[1])


def clipped(weight: torch.Tensor, gram: torch.Tensor, grid: Grid) -> Rounded:
    """Ranges of each group shrunk by what costs its outputs least."""
    runs = weight.unflatten(1, (-1, grid.group))
    groups = runs.shape[1]
    within = gram.view(groups, grid.group, groups, grid.group).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    best = torch.ones(runs.shape[:2], device=weight.device)
    least = torch.full_like(best, float("inf"))
    for shrink in SHRINKS:
        error = nearest(weight, grid, shrink).dense().unflatten(1, (-1, grid.group)) - runs
        cost = torch.einsum("rgi,gij,rgj->rg", error, within, error)
        better = cost < least
        best[better], least[better] = shrink, cost[better]
    return nearest(weight, grid, best)


def gptq(weight: torch.Tensor, gram: torch.Tensor, grid: Grid, *, act_order: bool) -> Rounded:
    """Columns in turn, or in the order of how much they matter; scales of a group are fitted when its first column
    comes, or, in another order, before the first of all."""
    diagonal = gram.diagonal()
    dead = diagonal == 0
    order = diagonal.argsort(descending=True) if act_order else torch.arange(len(diagonal), device=weight.device)
    inverse = _inverse_factor(gram + torch.diag(dead.to(gram.dtype)), order)
    matter = diagonal.unflatten(0, (-1, grid.group))  # how much an error of each column costs, by group
    scales, zeros = (each.t().contiguous() for each in grid.search(weight.unflatten(1, (-1, grid.group)), matter))
    left = weight.t()[order].clone()  # [columns, rows]: what is yet to be rounded
    left[dead[order]] = 0
    numbers = torch.empty_like(left)
    for first in range(0, len(left), BLOCK):
        last = min(first + BLOCK, len(left))
        errors = torch.empty_like(left[first:last])
        for at in range(first, last):
            group = int(order[at]) // grid.group
            if not act_order and at % grid.group == 0:
                scales[group], zeros[group] = grid.search(left[at : at + grid.group].t(), matter[group])
            numbers[at] = grid.round(left[at], scales[group], zeros[group])
            rounded = (numbers[at] - zeros[group]) * scales[group]
            errors[at - first] = (left[at] - rounded) / inverse[at, at]
            left[at:last].addr_(inverse[at, at:last], errors[at - first], alpha=-1)
        left[last:].addmm_(inverse[first:last, last:].t(), errors, alpha=-1)
    numbers = numbers[order.argsort()].t().to(torch.uint8).contiguous()
    return Rounded(numbers, scales.t().contiguous(), zeros.t().to(torch.uint8).contiguous(), grid.group)


def _inverse_factor(gram: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the damped gram's inverse, rows and columns in this order."""
    ordered = gram[order][:, order]
    damping = DAMPING * ordered.diagonal().mean()
    for _ in range(4):
        damped = ordered + damping * torch.eye(len(ordered), device=gram.device)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damping *= 10
    raise QuireError("GPTQ cannot invert what a matrix has seen; take a longer text, with other words in it")
