"""Triton twins of the kernels: one file a family, each tested against plain torch in interpreter mode.

Modules here import triton, so they are imported where they are chosen (`why_not` first) and never by the package.
Refuses to know: models, requests; what is fastest is a table (`configs.py`), not a search at run time.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


def why_not(device: torch.device) -> str | None:
    """None if these kernels can run on `device`, else the reason they cannot."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda":  # interpreter mode is for tests, which call the kernels directly
        return f"Triton kernels need a CUDA device, not {device.type}"
    return None


@cache
def moves_tiles(device: torch.device) -> bool:
    """Whether the chip moves tiles to its processors by itself, as tensor descriptors ask it to."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9
