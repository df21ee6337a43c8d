"""What a repository on a hub has: its files with their sizes, and which of them are the model that a reference names.

Knows: how repositories name weights and quantisations. Refuses to know: what is inside files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from quire.assets.gguf_parts import model_stem, part_paths
from quire.assets.hub import IGNORED, WANTED, HubReference, endpoint, named_errors
from quire.types.errors import ModelNotFoundError

DEFAULT_QUANT = "Q4_K_M"  # what llama.cpp and Ollama take where none is named
_QUANT = re.compile(r"(?:^|[-_.])((?:I?Q\d|TQ\d|MXFP4|BF16|F16|F32)[A-Z0-9_]*)$", re.IGNORECASE)


@dataclass(frozen=True)
class Listing:
    repository: str
    commit: str
    files: dict[str, int]  # bytes by name
    gated: bool

    @property
    def ggufs(self) -> dict[str, str]:
        """The GGUF models (of a split one the first file) by what they are quantised to, or by their file's name."""
        found: dict[str, str] = {}
        for file in sorted(self.files):
            path = Path(file)
            if path.suffix.lower() == ".gguf" and path == part_paths(path)[0] and "mmproj" not in path.name.lower():
                quant = _QUANT.search(model_stem(path))
                name = quant[1].upper() if quant else file
                found[file if name in found else name] = file
        return found

    def size(self, file: str) -> int:
        """Bytes of a file, or of all parts of a split GGUF."""
        return sum(self.files.get(part.as_posix(), 0) for part in part_paths(Path(file)))

    def wanted(self, reference: HubReference) -> dict[str, int]:
        """The files of a model with their sizes."""
        if reference.file:
            parts = [part.as_posix() for part in part_paths(Path(reference.file))]
            return {part: self.files.get(part, 0) for part in parts}
        return {
            name: size
            for name, size in self.files.items()
            if any(fnmatch(name, p) for p in WANTED) and not any(fnmatch(name, p) for p in IGNORED)
        }


def list_repository(reference: HubReference) -> Listing:
    """Ask the hub; takes one small answer."""
    with named_errors(reference) as hub:
        api = hub.HfApi(endpoint=endpoint(), library_name="quire")
        info = api.model_info(reference.repository, revision=reference.revision, files_metadata=True)
    files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return Listing(reference.repository, info.sha or "main", files, bool(getattr(info, "gated", False)))


def choose(reference: HubReference, listing: Listing) -> HubReference:
    """The reference with its file, where it names a quantisation, or nothing and the repository holds GGUF files."""
    models = listing.ggufs
    if reference.file:
        if reference.file not in listing.files:
            raise ModelNotFoundError(f"{reference.repository} has no file {reference.file!r}{_choices(listing)}")
        return reference
    if reference.tag:
        fitting = [quant for quant in models if quant.startswith(reference.tag.upper())]
        preferred = [q for q in (reference.tag.upper(), DEFAULT_QUANT) if q in fitting] + fitting
        if not preferred:
            raise ModelNotFoundError(f"{reference.repository} has no {reference.tag}{_choices(listing)}")
        return replace(reference, file=models[preferred[0]])
    if any(fnmatch(name, "*.safetensors") and "/" not in name for name in listing.files):
        return reference
    if not models:
        return reference
    if DEFAULT_QUANT in models or len(models) == 1:
        return replace(reference, file=models.get(DEFAULT_QUANT) or next(iter(models.values())))
    raise ModelNotFoundError(f"{reference.repository} holds GGUF files{_choices(listing)}")


def unreadable(listing: Listing) -> str:
    """Why a repository without GGUF files holds nothing to load; nothing if it does."""
    if "config.json" not in listing.files:
        return f"{listing.repository} holds no model that can be read here: no config.json, no .gguf"
    if any(fnmatch(name, "*.safetensors") and "/" not in name for name in listing.files):
        return ""
    if any(fnmatch(name, "*.bin") or fnmatch(name, "*.pt") for name in listing.files):
        return (
            f"{listing.repository} holds its weights as a pickle (pytorch_model.bin), which can run code when opened "
            "and is never read here"
        )
    return f"{listing.repository} holds a config.json and no weights"


def _choices(listing: Listing) -> str:
    models = listing.ggufs
    if not models:
        return ""
    shown = [f"{listing.repository}:{quant} ({listing.size(file) / 1e9:.2f} GB)" for quant, file in models.items()]
    return f"; name one of them: {', '.join(shown[:24])}"
