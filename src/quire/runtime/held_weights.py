"""An engine's weights where they outlast it: asked of the process that holds them, or given to it once they are loaded.

What tells weights apart is every file of the model (path, size, time of change), the options and decisions that shape
weights, and the code that lays them out. Whatever goes wrong with held weights, the engine loads its own.
Refuses to know: models.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from quire import kernels, model
from quire.kernels import cpu
from quire.runtime.cuda_blocks import CudaBlock
from quire.runtime.hardware import Resolved
from quire.runtime.host_blocks import HostBlock
from quire.types.config import EngineOptions
from quire.types.holder_messages import Drop, Find, Holding, Keep, ToHolder, close_all, receive_message, send_message

log = logging.getLogger(__name__)

GIB = 1 << 30
CHANGED = "weights are not held: the model's files have changed since they were opened"


def _stamp(files: Iterable[Path]) -> str:
    """What changes when a file does."""
    found = [(str(file.resolve()), file.stat()) for file in sorted(files)]
    return repr([(name, stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev) for name, stat in found])


CODE = _stamp(
    [
        *Path(model.__file__).parent.rglob("*.py"),
        *Path(kernels.__file__).parent.rglob("*.py"),
        *Path(cpu.__file__).parent.glob("*.so"),
    ]
)  # what lays weights out, as it was imported


class HolderLink:
    """The way to who holds weights of these files. Made before they are opened, so that a change is noticed."""

    def __init__(self, link: socket.socket, files: Sequence[Path]):
        self.socket = link
        self._files = files
        self.stamp = _stamp(files)

    def changed(self) -> bool:
        try:
            return _stamp(self._files) != self.stamp
        except OSError:  # one is gone
            return True

    def weights(self, options: EngineOptions, resolved: Resolved) -> HeldWeights:
        return HeldWeights(self, options, resolved)


class HeldWeights:
    """Implements `model.loading.held_model.WeightMemory`."""

    def __init__(self, link: HolderLink, options: EngineOptions, resolved: Resolved):
        self._link = link
        self._socket: socket.socket | None = link.socket
        self._device = torch.device(resolved.device)
        shaped_by = (
            dataclasses.astuple(options.model), dataclasses.astuple(options.device), resolved.device, resolved.dtype,
            resolved.quantize, resolved.fp8, torch.__version__, cpu.available() or cpu.features(), CODE, link.stamp,
        )  # fmt: skip
        self._identity = hashlib.blake2b(repr(shaped_by).encode(), digest_size=32).hexdigest()
        self._blocks: list[HostBlock | CudaBlock] = []
        self.limit = 0  # bytes that would be held
        self.held = False  # whether the next engine would find them
        self.state = "weights are not held"

    def find(self) -> tuple[list[torch.Tensor], bytes] | None:
        """Blocks and what says where tensors lie in them; None: they are not held."""
        if self._link.changed():
            self.refuse(CHANGED)
            return None
        holding, descriptors = self._ask(Find(self._identity))
        self.limit = holding.limit
        if not descriptors:
            return None
        try:
            index = os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0)
            sizes, _, index = index.partition(b"\n")
            for descriptor, size in zip(descriptors[1:], map(int, sizes.split()), strict=True):
                self._blocks.append(self._block(size, descriptor))
        except (OSError, ValueError, RuntimeError) as error:
            self.discard(f"held weights could not be mapped: {error}")
            return None
        finally:
            close_all(descriptors)
        self.held = True
        self.state = f"weights mapped: {self._size() / GIB:.2f} GiB that were held"
        return [block.bytes for block in self._blocks], index

    def create(self, size: int) -> torch.Tensor | None:
        """A block to fill; None: there is no memory for it."""
        try:
            self._blocks.append(self._block(size))
        except (OSError, ValueError, RuntimeError) as error:
            self.refuse(f"weights cannot be held: {error}")
            return None
        return self._blocks[-1].bytes

    def publish(self, index: bytes) -> None:
        """All blocks are full: whoever looks for these weights from now on finds them."""
        try:
            self._publish(index)
        except (OSError, RuntimeError) as error:
            self.refuse(f"weights cannot be held: {error}")

    def _publish(self, index: bytes) -> None:
        for block in self._blocks:
            block.seal()
        if self._link.changed():
            self.refuse(CHANGED)
            return
        sizes = " ".join(str(len(block.bytes)) for block in self._blocks)
        note = os.memfd_create("quire-weights-index", os.MFD_CLOEXEC)
        try:
            with open(note, "wb", closefd=False) as file:
                file.write(f"{sizes}\n".encode() + index)
            holding, _ = self._ask(Keep(self._identity, self._size()), [note, *(b.descriptor for b in self._blocks)])
        finally:
            os.close(note)
        if holding.held:
            self.held = True
            self.state = f"weights held: {self._size() / GIB:.2f} GiB, for the next engine to map"

    def refuse(self, why: str) -> None:
        """They are not held; what is in blocks stays where it is."""
        log.warning("%s", why)
        self.state = why

    def discard(self, why: str) -> None:
        """What was found is of no use."""
        self.refuse(why)
        self.release()

    def release(self) -> None:
        """Nothing uses the blocks any more: their memory is to be free, here and with the holder."""
        self._ask(Drop(self._identity))
        self.unmap()

    def unmap(self) -> None:
        """Nothing uses the blocks any more; they stay held for whoever looks for them."""
        for block in self._blocks:
            block.close()
        self._blocks, self.held = [], False

    def _size(self) -> int:
        return sum(block.size for block in self._blocks)

    def _block(self, size: int, at: int | None = None) -> HostBlock | CudaBlock:
        return HostBlock(size, at) if self._device.type == "cpu" else CudaBlock(size, self._device, at)

    def _ask(self, message: ToHolder, descriptors: Sequence[int] = ()) -> tuple[Holding, list[int]]:
        if self._socket is not None:
            try:
                send_message(self._socket, message, descriptors)
                return receive_message(self._socket, Holding)
            except (OSError, EOFError) as error:
                log.warning("weights are no longer held: %s", error)
                self._socket = None
        return Holding(held=False, limit=0), []
