"""Finding, fetching and reading model files: names → files on disk → checked headers and mapped bytes.

Knows: types, disks, pip, hubs. Refuses to know: torch, tokens, what any tensor is for.
"""

from quire.assets.catalog import CATALOG, CatalogModel
from quire.assets.hub_preview import Preview, preview
from quire.assets.local import LocalModel, ModelInfo, describe
from quire.assets.store import (
    cache_dir,
    copy,
    known_models,
    list_models,
    on_hub,
    path_of,
    present,
    pull,
    remove,
    resolve,
)

__all__ = [
    "CATALOG",
    "CatalogModel",
    "LocalModel",
    "ModelInfo",
    "Preview",
    "cache_dir",
    "copy",
    "describe",
    "known_models",
    "list_models",
    "on_hub",
    "path_of",
    "present",
    "preview",
    "pull",
    "remove",
    "resolve",
]
