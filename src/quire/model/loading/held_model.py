"""A model's tensors in memory that outlasts its engine: put there by the first that loads them, mapped by the next.

Tensors lie in blocks one behind the other, and an index says where. A model that is to be mapped is made without memory
of its own. Refuses to know: whose memory it is, which files it is for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from quire.model.decoder import Model
from quire.types.holder_messages import MAX_BLOCKS

ALIGN = 512  # bytes between which tensors begin, as torch's own allocator has it
BLOCK_BYTES = 1 << 30  # of which there are at most MAX_BLOCKS: those of larger models are larger


class WeightMemory(Protocol):
    limit: int  # bytes there may be

    def find(self) -> tuple[list[torch.Tensor], bytes] | None:
        """Blocks (uint8) and their index, if these weights are held."""
        ...

    def create(self, size: int) -> torch.Tensor | None:
        """A block to fill, in host memory of zeros; None: there is no memory for it."""
        ...

    def publish(self, index: bytes) -> None:
        """All blocks are full."""
        ...

    def refuse(self, why: str) -> None:
        """These weights are not held, or not all of them: they stay where they are."""
        ...

    def discard(self, why: str) -> None:
        """What was found is not what is needed."""
        ...


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    block: int
    offset: int

    def view(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        dtype = getattr(torch, self.dtype)
        held = blocks[self.block][self.offset : self.offset + _extent(self.shape, self.stride) * dtype.itemsize]
        return held.view(dtype).as_strided(self.shape, self.stride)


def hold_model(model: Model, memory: WeightMemory) -> None:
    """Move all tensors there, each staying the object it is, a block at a time: beside the model itself one block is
    taken. Where memory ends, those that are not moved stay where they are."""
    tensors = _tensors(model)
    total = sum(-(-_bytes(tensor) // ALIGN) * ALIGN for tensor in tensors.values())
    if total > memory.limit:
        if memory.limit:
            memory.refuse(f"weights are not held: they take {total:,} bytes, hold_weights allows {memory.limit:,}")
        return
    places, sizes = _layout(tensors, max(BLOCK_BYTES, -(-2 * total // (MAX_BLOCKS - 1))))
    blocks: list[torch.Tensor] = []
    for number, size in enumerate(sizes):
        if (block := memory.create(size)) is None:
            return
        blocks.append(block)
        for place in (place for place in places if place.block == number):
            tensor, there = tensors[place.name], place.view(blocks)
            there.copy_(tensor)
            tensor.data = there
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
    memory.publish(msgspec.json.encode(places))


def map_model(make: Callable[[], Model], memory: WeightMemory) -> Model | None:
    """The model with the tensors that are held, `finish` still to come; None: they are not held."""
    if (found := memory.find()) is None:
        return None
    blocks, index = found
    with _Unallocated() as unallocated:
        model = make()
        tensors = _tensors(model)
    places = msgspec.json.decode(index, type=list[TensorPlace])
    if [place.name for place in places] != list(tensors) or not unallocated.only(tensors.values()):
        memory.discard("held weights are not those of this model; they are loaded")
        return None
    for place in places:
        tensors[place.name].data = place.view(blocks)
    return model


class _Unallocated(TorchFunctionMode):
    """Tensors made by `torch.empty` have their shape, and memory of one element: they are to be given others'."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.empty:
            return func(*args, **(kwargs or {}))
        size = args[0] if isinstance(args[0], Sequence) else args
        made = torch.empty((), **(kwargs or {})).expand(size)
        self._made.append(weakref.ref(made))
        return made

    def only(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether there are no others left."""
        known = {id(tensor) for tensor in tensors}
        return all(id(made) in known for ref in self._made if (made := ref()) is not None)


def _tensors(model: Model) -> dict[str, torch.Tensor]:
    """By name, each once; without LoRA adapters', which are written to."""
    modules = model.modules().items()
    named = {
        f"{name}.{kind}": tensor
        for name, module in modules
        for kind, tensor in module.tensors().items()
        if not kind.startswith("lora_")
    }
    seen: set[int] = set()
    return {name: t for name, t in named.items() if not (id(t) in seen or seen.add(id(t)))}  # type: ignore[func-returns-value]


def _layout(tensors: dict[str, torch.Tensor], block_bytes: int) -> tuple[list[TensorPlace], list[int]]:
    """Where each tensor goes, and the blocks' sizes."""
    places: list[TensorPlace] = []
    sizes: list[int] = []
    for name, tensor in tensors.items():
        size = -(-_bytes(tensor) // ALIGN) * ALIGN
        if not sizes or (sizes[-1] and sizes[-1] + size > block_bytes):
            sizes.append(0)
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append(TensorPlace(name, dtype, tuple(tensor.shape), tensor.stride(), len(sizes) - 1, sizes[-1]))
        sizes[-1] += size
    return places, sizes


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _bytes(tensor: torch.Tensor) -> int:
    return _extent(tensor.shape, tensor.stride()) * tensor.dtype.itemsize
