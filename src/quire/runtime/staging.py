"""The way from host arrays to the device: a ring of pinned buffers, so that copies neither wait nor allocate.

Step n writes into one buffer of the ring while copies of the steps before may still be reading theirs; a buffer is
written again only after more steps have begun than can be in flight. Refuses to know: what is copied.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]

BUFFER_ELEMENTS = 1 << 18  # 2 MiB; what does not fit is pinned on the spot


class Staging:
    def __init__(self, device: torch.device, depth: int):
        self._device = device
        self._used = 0
        self._step = 0
        self._ring: list[torch.Tensor] = []
        if device.type == "cuda":
            self._ring = [torch.empty(BUFFER_ELEMENTS, dtype=torch.int64, pin_memory=True) for _ in range(depth + 2)]

    def rotate(self) -> None:
        """A new step begins."""
        self._used = 0
        self._step += 1

    def stage(self, array: Ints) -> torch.Tensor:
        """The array in memory the device can read by itself, untouched until the ring comes round."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if not self._ring:
            return tensor
        end = self._used + tensor.numel()
        if end > BUFFER_ELEMENTS:
            return tensor.pin_memory()
        place = self._ring[self._step % len(self._ring)][self._used : end].view(tensor.shape)
        self._used = end
        return place.copy_(tensor)

    def upload(self, array: Ints) -> torch.Tensor:
        """The array on the device, without waiting."""
        return self.stage(array).to(self._device, non_blocking=True)
