from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.generation.sampling.sampler import Sampler
from quire.types.plan import Admit
from quire.types.sampling_params import SamplingParams

AdmitRow = Callable[..., None]


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every test that takes a device runs on the CPU, and on a GPU where there is one."""
    return torch.device(request.param)


@pytest.fixture
def admit() -> AdmitRow:
    """admit(sampler, slot, prompt_len=..., seed=..., branch=..., stop_ids=..., **sampling parameters)"""

    def fill(
        sampler: Sampler,
        slot: int,
        *,
        prompt_len: int = 1,
        seed: int = 0,
        branch: int = 0,
        stop_ids: list[int] | None = None,
        **params: Any,
    ) -> None:
        sampler.admit(
            Admit(
                slot=slot,
                key=f"r{slot}/{branch}",
                tokens=[],
                prompt_len=prompt_len,
                params=SamplingParams(**params),
                seed=seed,
                branch=branch,
                stop_ids=stop_ids or [],
            )
        )

    return fill
