"""The compiled CPU path: a whole quantised decoder in one call per step, from packed weights to logits.

`shared_object` finds the library, `structs` says what goes over its border, `matrix_packing`, `weights` and `program`
wrap what it does. Knows: torch tensors as memory, the KV layout. Refuses to know: weight files, families, requests.
"""

from quire.kernels.cpu.matrix_packing import PackedMatrix, Store
from quire.kernels.cpu.native_sampling import NativeSampling
from quire.kernels.cpu.program import KV_KINDS, NativeProgram
from quire.kernels.cpu.shared_object import available, features

__all__ = ["KV_KINDS", "NativeProgram", "NativeSampling", "PackedMatrix", "Store", "available", "features"]
