"""A weight source in which matrices of a published format are one tensor each: 4- and 8-bit integers as blocks that
keep their bits, everything else as floats. Refuses to know: how any format packs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from quire.model.loading.formats.awq import Awq
from quire.model.loading.formats.bitsandbytes import BitsAndBytes
from quire.model.loading.formats.compressed_tensors import CompressedTensors
from quire.model.loading.formats.fp8_weights import Fp8Weights
from quire.model.loading.formats.gptq import Gptq
from quire.model.loading.formats.mxfp4 import Mxfp4
from quire.model.loading.formats.packed_matrix import DTYPES, Parts, PublishedFormat
from quire.types.errors import ModelFileError
from quire.types.seams import TensorInfo, WeightSource

METHODS: dict[str, Callable[[Mapping[str, Any]], PublishedFormat]] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8Weights,
    "mxfp4": Mxfp4,
    "bitsandbytes": BitsAndBytes,
}
SMALL_BYTES = 1 << 16  # of parts that say what the others are
_BLOCK_BYTES = {"Q4_1": (32, 20), "Q8_0": (32, 34), "MXFP4": (32, 17), "F32": (1, 4)}


def unquantised(source: WeightSource, *, blocks: bool) -> WeightSource:
    """The source itself where it is not quantised, or in a way that the loader knows by itself. `blocks`: integers stay
    such, their scales and minima rounded to 16 bits; else all become floats."""
    config = source.metadata().get("quantization_config") or source.metadata().get("compression_config")
    if not config:
        return source
    method = config.get("quant_method", "compressed-tensors") if isinstance(config, Mapping) else config
    if not isinstance(config, Mapping) or not isinstance(method, str) or method not in METHODS:
        raise ModelFileError(f"model is quantised with {method!r}, which is not supported; {', '.join(METHODS)} are")
    try:
        form = METHODS[method](config)
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelFileError(f"quantization_config of {method} does not work out: {error}") from error
    return PublishedSource(source, form, blocks)


class PublishedSource:
    def __init__(self, source: WeightSource, form: PublishedFormat, blocks: bool):
        self._blocks = blocks
        self._source = source
        self._format = form
        self._stored = source.tensors()
        self._tensors: dict[str, TensorInfo] = {}
        self._parts: dict[str, dict[str, str]] = {}  # tensor → part → stored name
        self._last: tuple[str, np.ndarray] | None = None  # read again for each expert of a stack
        found: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for name, info in self._stored.items():
            place = form.split(name)
            if place is None:
                self._tensors[name] = info
            else:
                found[place[0]][place[1]] = name
        for name, parts in found.items():
            self._add(name, parts)
        if not self._parts:
            raise ModelFileError(f"model config says that weights are quantised with {form.name}, but none is")

    def _add(self, name: str, parts: dict[str, str]) -> None:
        infos = {part: self._stored[stored] for part, stored in parts.items()}
        try:
            small = {p: self._part(p, parts) for p, info in infos.items() if info.nbytes <= SMALL_BYTES}
            what = self._format.matrix(infos, small)
        except KeyError as error:
            raise self._incomplete(name, error) from error
        except (IndexError, ValueError) as error:
            shapes = ", ".join(f"{part} {info.shape}" for part, info in infos.items())
            raise ModelFileError(
                f"{self._format.name} matrix {name!r} has parts that do not fit ({shapes}): {error}"
            ) from error
        if what is None:
            self._tensors |= {stored: self._stored[stored] for stored in parts.values()}
            return
        shape, kind = what if self._blocks else (what[0], "F32")
        unit, nbytes = _BLOCK_BYTES[kind]
        self._tensors[name] = TensorInfo(name, shape, kind, int(np.prod(shape)) // unit * nbytes)
        self._parts[name] = parts

    def _incomplete(self, name: str, error: KeyError) -> ModelFileError:
        return ModelFileError(f"{self._format.name} matrix {name!r} is not complete: it has no {error.args[0]!r}")

    def metadata(self) -> dict[str, Any]:
        return self._source.metadata()

    def tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> np.ndarray:
        if name not in self._parts:
            return self._source.read(name)
        if self._last is None or self._last[0] != name:
            self._last = name, self._decode(name)
        return self._last[1]

    def _decode(self, name: str) -> np.ndarray:
        parts: Parts = {part: self._part(part, self._parts[name]) for part in self._parts[name]}
        try:
            numbers = self._format.decode(parts, self._tensors[name].kind).contiguous()
            if numbers.is_floating_point() and not numbers.isfinite().all():
                raise ValueError("not all of its numbers are finite")
            made = numbers.view(torch.uint8).flatten()
        except KeyError as error:
            raise self._incomplete(name, error) from error
        except (IndexError, RuntimeError, ValueError) as error:
            raise ModelFileError(f"{self._format.name} matrix {name!r} does not work out: {error}") from error
        if made.numel() != self._tensors[name].nbytes:
            raise ModelFileError(f"{self._format.name} matrix {name!r} does not have the shape that its parts say")
        return made.numpy()

    def _part(self, part: str, parts: Mapping[str, str]) -> torch.Tensor:
        info = self._stored[parts[part]]
        if info.kind not in DTYPES:
            raise ModelFileError(f"tensor {info.name!r} has type {info.kind}, which is not supported")
        if not info.nbytes:
            return torch.empty(info.shape, dtype=DTYPES[info.kind])
        raw = torch.from_numpy(self._source.read(info.name).copy())
        return raw.view(DTYPES[info.kind]).reshape(info.shape)
