"""LoRA adapters by name: which are loaded, in which slots, and who runs with them.

An adapter's digest becomes part of its requests' salt: no KV is shared between adapters, or between one and another of
the same name later, on the device as in tiers. Unloading takes the name away at once; requests that have it finish with
it, and only then does its slot become free.

Refuses to know: files, weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from quire.types.config import LoraOptions
from quire.types.errors import InputError, ModelNotFoundError, OverloadedError
from quire.types.messages import AdapterInfo
from quire.types.request import Request
from quire.types.seams import Executor


@dataclass(frozen=True)
class _Loaded:
    slot: int
    path: str
    digest: str


class Adapters:
    def __init__(self, options: LoraOptions, executor: Executor):
        self._executor = executor
        self._slots = options.slots
        self._free = list(range(options.slots, 0, -1))
        self._loaded: dict[str, _Loaded] = {}
        self._retired: set[int] = set()  # slots whose adapters were unloaded, and may be in use still
        for name, path in options.named.items():
            self.load(name, path)

    def list(self) -> list[AdapterInfo]:
        return [AdapterInfo(name, one.path) for name, one in self._loaded.items()]

    def load(self, name: str, path: str, live: Iterable[Request] = ()) -> None:
        """`live`: the requests that are not over."""
        if not self._slots:
            raise InputError("this engine has no room for adapters; start it with max_loras")
        if not name or name in self._loaded:
            raise InputError(f"an adapter {name!r} is loaded already" if name else "an adapter needs a name")
        self.release(live)
        if not self._free:
            if self._retired:
                raise OverloadedError(
                    f"all {self._slots} adapter slots (max_loras) are taken, {len(self._retired)} of them by adapters "
                    "that were unloaded but are in use; try again when their requests are done"
                )
            raise InputError(f"all {self._slots} adapter slots (max_loras) are taken; unload an adapter first")
        digest = self._executor.load_adapter(self._free[-1], path)
        self._loaded[name] = _Loaded(self._free.pop(), path, digest)

    def unload(self, name: str, live: Iterable[Request]) -> None:
        if name not in self._loaded:
            raise ModelNotFoundError(f"no adapter {name!r} is loaded")
        self._retired.add(self._loaded.pop(name).slot)
        self.release(live)

    def release(self, live: Iterable[Request]) -> None:
        """Free the slots of unloaded adapters that no request uses any more."""
        if not self._retired:
            return
        for slot in self._retired - {request.lora_slot for request in live}:
            self._executor.unload_adapter(slot)
            self._retired.remove(slot)
            self._free.append(slot)

    def resolved(self, request: Request) -> Request:
        """With the slot of the adapter it names, and a salt that no caller can give another request."""
        salt = request.salt.replace("\0", "\0\0")
        if not request.lora:
            return request if salt == request.salt else replace(request, salt=salt)
        one = self._loaded.get(request.lora)
        if one is None:
            raise ModelNotFoundError(f"no adapter {request.lora!r} is loaded")
        return replace(request, lora_slot=one.slot, salt=f"{salt}\0lora:{one.digest}")
