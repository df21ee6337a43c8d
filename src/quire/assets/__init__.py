"""Finding, fetching and reading model files: names → files on disk → checked headers and mapped bytes.

Knows: types, disks, pip, hubs. Refuses to know: torch, tokens, what any tensor is for.
"""

from quire.assets.local import LocalModel, ModelInfo, describe
from quire.assets.store import cache_dir, copy, known_models, list_models, on_hub, path_of, pull, remove, resolve

__all__ = [
    "LocalModel",
    "ModelInfo",
    "cache_dir",
    "copy",
    "describe",
    "known_models",
    "list_models",
    "on_hub",
    "path_of",
    "pull",
    "remove",
    "resolve",
]
