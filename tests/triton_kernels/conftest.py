"""Triton kernels run here in interpreter mode: on a CPU, as numpy (see the conftest above)."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton.language")
import interpreted_triton  # noqa: F401


@pytest.fixture(autouse=True)
def seeded_and_quiet():
    """Kernels divide by zero where a mask hides the result; on a GPU nobody hears of it."""
    torch.manual_seed(0)
    with np.errstate(all="ignore"):
        yield
