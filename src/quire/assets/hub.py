"""Models on a hub: `org/name`, optionally `:file.gguf` or `:Q4_K_M`, and `@revision`. The hub is the one HF_ENDPOINT
names.

huggingface_hub does the fetching (progress, resume after a dropped connection, its cache layout); it is imported
only here and only when something must be fetched. Knows: which files of a repository are a model. Refuses to
know: what is inside them.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from quire.assets import catalog
from quire.assets.gguf_parts import part_paths
from quire.types.errors import ConfigError, ModelNotFoundError, QuireError

if TYPE_CHECKING:
    from huggingface_hub.utils import tqdm

_PART = r"[A-Za-z0-9][\w.-]*"
_REFERENCE = re.compile(
    rf"({_PART}/{_PART})(?::(?:((?:{_PART}/)*{_PART}\.gguf)|([A-Za-z]\w*)))?(?:@([A-Za-z0-9][\w./-]*))?", re.ASCII
)

WANTED = ["config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "*.jinja", "*.safetensors*"]
WANTED += ["modules.json", "*_Pooling/config.json"]  # of sentence-transformers
IGNORED = ["*/*", "consolidated*"]  # copies in other formats, and the same weights a second time


@dataclass(frozen=True)
class HubReference:
    repository: str
    file: str | None = None
    revision: str | None = None
    tag: str | None = None  # what the GGUF file wanted is quantised to, such as Q4_K_M

    @classmethod
    def parse(cls, text: str) -> HubReference | None:
        match = _REFERENCE.fullmatch(text)
        if match is None or ".." in text:
            return None
        return cls(match[1], match[2], match[4], match[3])

    @property
    def folder(self) -> str:
        """The repository's folder in the cache."""
        return "models--" + self.repository.replace("/", "--")


Report = Callable[[str, int, int], None]  # what is fetched, bytes so far, bytes in all (0: not known yet)


def endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


@contextmanager
def named_errors(reference: HubReference) -> Iterator[Any]:
    """huggingface_hub; what goes wrong in it is told in our words."""
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError as error:
        raise ConfigError("fetching from a hub needs huggingface_hub: pip install huggingface_hub") from error
    try:
        yield hub
    except QuireError:
        raise
    except Exception as error:  # a third party's network stack: anything may come out
        raise ModelNotFoundError(_explain(error, reference, errors)) from error


def fetch(reference: HubReference, cache: Path, progress: bool | Report) -> Path:
    """Fetch what is missing and return the GGUF file (of a split one the first) or the directory of the snapshot.
    `progress`: show it in the terminal, or whom to tell."""
    with named_errors(reference) as hub:
        from huggingface_hub.utils import tqdm

        common: dict[str, Any] = {
            "repo_id": reference.repository,
            "revision": reference.revision,
            "cache_dir": cache,
            "endpoint": endpoint(),
            "library_name": "quire",
            "tqdm_class": tqdm if progress is True else _telling(tqdm, progress) if progress else _quiet(tqdm),
        }
        if reference.file:
            parts = part_paths(Path(reference.file))
            paths = [Path(hub.hf_hub_download(filename=part.as_posix(), **common)) for part in parts]
            return paths[0]
        return Path(hub.snapshot_download(allow_patterns=WANTED, ignore_patterns=IGNORED, **common))


def _explain(error: Exception, reference: HubReference, errors: ModuleType) -> str:
    name = reference.repository
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept its terms on the hub, then set HF_TOKEN to your token"
    if isinstance(error, errors.RepositoryNotFoundError):
        close = [other for other in catalog.similar(name) if other != name]
        guess = f"; did you mean {' or '.join(close)}?" if close else ""
        return f"the hub has no model {name!r} (or it is private: then set HF_TOKEN){guess}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {reference.revision!r}"
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return f"{name} has no file {reference.file!r}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot fetch {name}: the disk is full; make room and try again, files that are complete are kept"
    cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"cannot fetch {name}: {cause} Check the network (and HF_ENDPOINT, if it is set) and try again; "
        "files that are complete are kept"
    )


def _quiet(base: type[tqdm]) -> type[tqdm]:
    class Quiet(base):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **{**kwargs, "disable": True})

    return Quiet


def _telling(base: type[tqdm], report: Report) -> type[tqdm]:
    class Telling(base):  # type: ignore[misc, valid-type]
        """Counts as a bar does, and draws nothing."""

        def __init__(self, *args: Any, **kwargs: Any):
            self._told = int(kwargs.get("initial") or 0)
            self._bytes = kwargs.get("unit") == "B"  # others count files
            self._what = str(kwargs.get("desc") or "").rpartition("/")[2]  # a file's name, or the end of its address
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self._told += int(n or 0)
            if self._bytes:
                report(self._what, self._told, int(self.total or 0))
            return None

    return Telling
