"""The control plane of KV memory: who holds which page, and which prefix a page contains.

Knows: types. Refuses to know: tensors, devices, requests, policies of who runs.
"""

from quire.memory.manager import Hit, KVManager, PageTable
from quire.memory.pool import ContiguousPool, PagePool
from quire.memory.prefix import PrefixIndex

__all__ = ["ContiguousPool", "Hit", "KVManager", "PagePool", "PageTable", "PrefixIndex"]
