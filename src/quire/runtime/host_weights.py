"""Weights in host memory while an engine sleeps, and host memory given back to the system.

Page-locked, so that they come back at the speed of the bus; locking memory takes longer than filling it, so it is kept
for the next time. Refuses to know: models.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable

import torch

PURGE_DELAY_S = 0.15  # after which mimalloc gives back what was freed, when it next frees something
PURGE_BYTES = 64 << 20  # ... that is too large for a segment


def give_back_freed() -> None:
    """What allocators keep of freed host memory: glibc's, and mimalloc, which torch has on Arm."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    time.sleep(PURGE_DELAY_S)
    torch.empty(PURGE_BYTES, dtype=torch.uint8)


class HostWeights:
    def __init__(self) -> None:
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: a tensor, and what it is in host memory

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move tensors there, each staying the object it is; nothing of them is left on the device."""
        fresh = {id(tensor): tensor for tensor in tensors}
        held, self._held = self._held, {}
        for key, tensor in fresh.items():
            _, host = held.get(key, (None, None))
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            host.copy_(tensor, non_blocking=True)
            self._held[key] = tensor, host
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for tensor, host in self._held.values():
            tensor.data = host

    def lacks(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of host memory that these would take in addition to what is kept."""
        return sum(tensor.nbytes for tensor in tensors if id(tensor) not in self._held)

    def give_back(self, device: torch.device) -> None:
        for tensor, host in self._held.values():
            tensor.data = host.to(device, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
