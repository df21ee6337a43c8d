"""Rows of a matrix as 8-bit floats (e4m3): the scale by which each loses least.

Floats round every octave alike: scales differ by which of a row's numbers lie between two 8-bit ones, and all there are
lie within one octave. The row's largest number becomes 448, then 440, and so on; the eight of these that are 8-bit
floats are among them, so rows that once were such floats stay what they are.

Refuses to know: what rows are multiplied with.
"""

from __future__ import annotations

import torch

LARGEST = 448  # of e4m3
STEP = 8  # from what the largest number becomes to the next; at LARGEST / 2 all begins anew


def row_scales(rows: torch.Tensor, matter: torch.Tensor | None = None) -> torch.Tensor:
    """Of rows [n, width]: float32 [n]. `matter`, [width]: what the square of an error costs, if not the same in each
    column."""
    wide = rows.float()
    largest = wide.abs().amax(1)
    best, least = (largest / LARGEST).clamp(min=1e-12), torch.full_like(largest, float("inf"))
    for candidate in range(LARGEST, LARGEST // 2, -STEP):
        scale = (largest / candidate).clamp(min=1e-12)
        steps = wide / scale[:, None]
        error = (steps.to(torch.float8_e4m3fn).float() - steps).square_()
        cost = (error.sum(1) if matter is None else error @ matter) / (candidate * candidate)  # of the largest's square
        best = torch.where(cost < least, scale, best)
        least = torch.minimum(least, cost)
    return best
