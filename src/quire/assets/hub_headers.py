"""Headers of model files that are still on a hub: read by ranges, a few kilobytes of safetensors, a few megabytes of a
GGUF with its vocabulary.

Knows: where headers end. Refuses to know: what keys and tensors mean to a model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from quire.assets.gguf_parts import part_paths
from quire.assets.gguf_reader import GGUFHeader
from quire.assets.hub import HubReference, endpoint, named_errors
from quire.assets.hub_listing import Listing
from quire.assets.json_files import BeginningTooShort, parse_json
from quire.assets.safetensors_reader import INDEX, SafetensorsHeader
from quire.types.errors import ModelFileError
from quire.types.seams import TensorInfo

FIRST_BYTES = {".safetensors": 64 << 10, ".gguf": 1 << 20}  # most headers, and most of one without its vocabulary
CONNECTIONS = 8

Header = TypeVar("Header")


class HeadersOnlyError(ModelFileError):
    """The values of a tensor were asked for, and are still on the hub."""


class HeaderSource:
    """A WeightSource of headers alone: what a model is, and no values. `fetched`: bytes it took to know."""

    def __init__(self, metadata: dict[str, Any], tensors: dict[str, TensorInfo], fetched: int):
        self._metadata = metadata
        self._tensors = tensors
        self.fetched = fetched

    def metadata(self) -> dict[str, Any]:
        return self._metadata

    def tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> np.ndarray:
        raise HeadersOnlyError(f"the values of {name!r} are not here yet")


def read_headers(reference: HubReference, listing: Listing) -> HeaderSource:
    """The headers of the model that `reference` names; its `file` is chosen where it has to be."""
    remote = _Remote(reference, listing)
    if reference.file:
        parts = [part.as_posix() for part in part_paths(Path(reference.file))]
        ggufs = remote.headers(parts, GGUFHeader)
        tensors = {name: info for header in ggufs for name, info in header.tensors.items()}
        return HeaderSource(ggufs[0].metadata, tensors, remote.fetched)
    config = parse_json(remote.whole("config.json"), f"config.json of {reference.repository}")
    top = sorted(name for name in listing.files if name.endswith(".safetensors") and "/" not in name)
    if INDEX in listing.files:
        placed = parse_json(remote.whole(INDEX), INDEX).get("weight_map")
        if not isinstance(placed, Mapping) or not set(placed.values()) <= set(top):
            raise ModelFileError(f"{INDEX} of {reference.repository} names shards that it does not have")
        files = sorted(set(placed.values()))
    else:
        files = ["model.safetensors"] if "model.safetensors" in top else top[:1]  # none: weights of another kind
    found = remote.headers(files, SafetensorsHeader)
    tensors = {name: info for header in found for name, info in header.tensors.items()}
    return HeaderSource(config, tensors, remote.fetched)


class _Remote:
    """Ranges of files in one repository, at one commit."""

    def __init__(self, reference: HubReference, listing: Listing):
        self._reference = reference
        self._listing = listing
        self.fetched = len(json.dumps(listing.files))  # about what the list of files took

    def whole(self, file: str) -> bytes:
        return self._range(file, 0, self._listing.files.get(file, 0))

    def headers(self, files: list[str], parse: Callable[[memoryview, int, str], Header]) -> list[Header]:
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return list(pool.map(lambda file: self._header(file, parse), files))

    def _header(self, file: str, parse: Callable[[memoryview, int, str], Header]) -> Header:
        size, wanted = self._listing.files.get(file, 0), FIRST_BYTES[Path(file).suffix.lower()]
        data = b""
        while True:
            data += self._range(file, len(data), min(size, wanted))
            try:
                return parse(memoryview(data), size, f"{self._reference.repository}/{file}")
            except BeginningTooShort as short:
                wanted = max(short.needed, 2 * len(data))

    def _range(self, file: str, start: int, end: int) -> bytes:
        """Bytes from `start` up to `end`; a server that knows no ranges is cut short."""
        if end <= start:
            raise ModelFileError(f"{self._reference.repository}/{file} ends inside its header; it is truncated")
        with named_errors(self._reference) as hub:
            url = hub.hf_hub_url(self._reference.repository, file, revision=self._listing.commit, endpoint=endpoint())
            headers = {**hub.utils.build_hf_headers(library_name="quire"), "Range": f"bytes={start}-{end - 1}"}
            with hub.utils.get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
                hub.utils.hf_raise_for_status(answer)
                skipped = 0 if answer.status_code == 206 else start
                found = bytearray()
                for piece in answer.iter_bytes(64 << 10):
                    found += piece
                    if len(found) >= skipped + end - start:
                        break
        data = bytes(found[skipped : skipped + end - start])
        self.fetched += len(found)
        return data
