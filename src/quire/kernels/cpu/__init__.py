"""The compiled CPU path: a whole quantised decoder in one call per step, from packed weights to logits.

`library` finds the shared object, `program` and `draw` wrap what it does, `twin` says the same in plain torch.
Knows: torch tensors as memory, the KV layout. Refuses to know: weight files, families, requests.
"""

from quire.kernels.cpu.native_draw import CompiledDraw
from quire.kernels.cpu.program import NativeProgram, PackedMatrix, Store
from quire.kernels.cpu.shared_object import available, features

__all__ = ["CompiledDraw", "NativeProgram", "PackedMatrix", "Store", "available", "features"]
