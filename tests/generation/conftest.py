from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quire.generation.sampling import logit_processors, logprobs, sampler, top_k
from quire.generation.sampling.sampler import Sampler
from quire.types.plan import Admit
from quire.types.sampling_params import SamplingParams

AdmitRow = Callable[..., None]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton kernels sample, as on a GPU, in its interpreter."""
    pytest.importorskip("triton.language")
    if torch.cuda.is_available():
        pytest.skip("they run on the GPU")
    import interpreted_triton  # noqa: F401

    for module in (logit_processors, logprobs, sampler, top_k):
        monkeypatch.setattr(module, "why_not", lambda device: None)
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def replays(kernels: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kinds of sampling that were replayed: as on a GPU, captured launches read and write the same memory."""
    from quire.generation.sampling import kernel_sampling

    found = []

    def record(self: Any, kind: Any, tokens: torch.Tensor) -> Any:
        given = self._memory_of(kind, tokens)
        drawn, scores = self._launch(kind, given)

        def replay() -> None:
            found.append(kind)
            again, rescored = self._launch(kind, given)
            drawn.copy_(again)
            if scores is not None:
                scores.copy_(rescored)

        return kernel_sampling._Capture(replay, drawn, scores)

    monkeypatch.setattr(kernel_sampling.KernelSampling, "_record", record)
    return found


DEVICES = ["cuda"] if torch.cuda.is_available() else [pytest.param("kernels", marks=pytest.mark.slow)]


@pytest.fixture(params=["cpu", *DEVICES])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every test that takes a device runs on the CPU, and on a GPU where there is one; else its kernels are
    interpreted."""
    if request.param == "kernels":
        request.getfixturevalue("kernels")
        return torch.device("cpu")
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
