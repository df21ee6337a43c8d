"""What every launch shares: the counters by which the last program of a group knows itself, overlap of launches, and
compiling.

Several programs that split one sum leave partial results and count themselves; whoever counts last adds up, in a
fixed order, and sets the counter back to zero. So counters are zero between launches, a captured graph needs no
clearing, and results do not depend on who came last. They serve one stream at a time.

Refuses to know: what is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import cache
from threading import Lock
from typing import Any

import torch

from quire.types.errors import lacks_memory
from quire.types.memory_use import usable_cores

COUNTERS = 1 << 20  # programs groups of one launch; never grown, because captured graphs keep its address

_counters: dict[torch.device, torch.Tensor] = {}
_loading = Lock()


def counters(device: torch.device, needed: int) -> torch.Tensor:
    if needed > COUNTERS:
        raise ValueError(f"a launch with {needed} split groups needs more counters than {COUNTERS}; launch in parts")
    if device not in _counters:
        _counters[device] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    return _counters[device]


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels, and load them before anybody has them, one after the other: of two that are loaded
    at the same time one may get the launcher of the other."""

    device: torch.device | None = None

    def submit(self, compiled: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def loaded() -> Any:
            kernel = compiled(*args, **kwargs)
            if self.device is not None:
                with _loading, torch.cuda.device(self.device):
                    self._load(kernel)
            return kernel

        return super().submit(loaded)

    @staticmethod
    def _load(kernel: Any) -> None:
        """All who ask for it would have the error; what torch keeps for later is in its way at most once."""
        try:
            kernel._init_handles()
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            torch.cuda.empty_cache()
            kernel._init_handles()


def compile_together(jobs: Sequence[Callable[[], None]], device: torch.device | None) -> None:
    """Run jobs that launch kernels, each in a thread; what is not compiled yet is compiled for all, on all cores. They
    must launch in one stream, because they share counters. What finds no memory beside the others runs again alone. No
    device: they launch nothing, only compile."""
    import triton

    class Once(triton.AsyncCompileMode):
        """Left to itself it compiles a kernel for each thread that asks at the same moment."""

        def submit(self, *arguments: Any) -> Any:
            with lock:
                return super().submit(*arguments)

    lock = Lock()
    with _Compilers(usable_cores()) as compilers, Once(compilers):
        compilers.device = device
        places = [copy_context() for _ in jobs]  # where that mode is on
        with ThreadPoolExecutor(len(jobs)) as threads:
            fitted = list(threads.map(lambda place, job: place.run(_fits, job), places, jobs))
    for job in (job for job, fits in zip(jobs, fitted, strict=True) if not fits):
        if device is not None:
            torch._C._cuda_clearCublasWorkspaces()  # of threads that have ended
            torch.cuda.empty_cache()
        job()


def _fits(job: Callable[[], None]) -> bool:
    try:
        job()
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        return False
    return True


class _CompiledOnly(Exception):
    pass


class _CompileOnly(Executor):
    def submit(self, compiled: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        compiled(*args, **kwargs)
        raise _CompiledOnly


def compile_only(job: Callable[[], object]) -> None:
    """Compile the kernel that a job would launch first, unless it is there, for others to find on disk: it is not
    loaded here, so another thread may launch and load what it likes meanwhile."""
    import triton

    with triton.AsyncCompileMode(_CompileOnly()), suppress(_CompiledOnly):
        job()


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may start before the one ahead of it in the stream ends (it waits before it reads results)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def overlap(device: torch.device) -> dict[str, Any]:
    """Launch options for a kernel that has a PDL parameter."""
    return {"PDL": True, "launch_pdl": True} if overlaps(device) else {"PDL": False}


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def power_of_two(size: int) -> int:
    """The smallest power of two that holds `size`."""
    return 1 << max(size - 1, 0).bit_length()
