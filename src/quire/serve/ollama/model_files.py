"""Model files as Ollama's API tells of them and handles them: sizes in words, digests, pull, copy.

Refuses to know: HTTP, requests to the model.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path

from quire import assets
from quire.serve.ollama.ollama_bodies import OllamaProgress
from quire.types.errors import ModelNotFoundError, OverloadedError

DIGEST_SECONDS = 5.0  # to wait for a digest that takes long; a later request finds it
_BLOB = re.compile(r"[0-9a-f]{64}")  # how a hub's cache names files by their SHA-256


def parameter_size(count: int) -> str:
    """134515008 → 134.52M"""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return str(count) if count else ""


def digest_of(path: Path) -> str:
    """The SHA-256 of a model's file; of a directory, that of its files' names and digests. Reads what no name tells."""
    if path.is_file():
        blob = path.resolve().name
        if _BLOB.fullmatch(blob):
            return blob
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = sorted(file for file in path.iterdir() if file.is_file())
    return hashlib.sha256(json.dumps([[file.name, digest_of(file)] for file in files]).encode()).hexdigest()


class Digests:
    """Digests of model files, computed once and in a thread."""

    def __init__(self) -> None:
        self._found: dict[tuple[Path, int], asyncio.Future[str]] = {}

    async def of(self, path: str) -> str:
        """Nothing, if there is no such file or it takes too long for now."""
        file = Path(path)
        if not path or not file.exists():
            return ""
        key = file, file.stat().st_mtime_ns
        if key not in self._found:
            self._found[key] = asyncio.ensure_future(asyncio.to_thread(digest_of, file))
        try:
            return await asyncio.wait_for(asyncio.shield(self._found[key]), DIGEST_SECONDS)
        except (TimeoutError, OSError):
            return ""


def is_copy(name: str, path: str) -> bool:
    """Whether a name was given to the model at `path` (`/api/copy`)."""
    return assets.path_of(name) == Path(path)


def fetchable(name: str) -> str:
    """A name as the cache knows it; raises where it is none that may be fetched."""
    name = name.removesuffix(":latest")
    if name.lower() not in assets.known_models() and not assets.on_hub(name):
        known = ", ".join(assets.known_models())
        raise ModelNotFoundError(f"no model {name[:128]!r}: known names are {known}; others are org/name[:file.gguf]")
    return name


class Pulls:
    """Models being fetched, one at a time."""

    def __init__(self) -> None:
        self._work: asyncio.Future[assets.LocalModel] | None = None

    async def pull(self, name: str) -> AsyncGenerator[OllamaProgress, None]:
        """Fetch a model into the cache, telling how far it is; errors are raised. One that has begun ends, whether or
        not somebody still looks."""
        if self._work is not None and not self._work.done():
            raise OverloadedError("another model is being fetched; try again later", retry_after=10)
        loop, told = asyncio.get_running_loop(), asyncio.Queue[OllamaProgress | None]()

        def report(what: str, done: int, total: int) -> None:
            step = OllamaProgress(status=f"pulling {what}".strip(), total=total, completed=done)
            loop.call_soon_threadsafe(told.put_nowait, step)

        work = self._work = asyncio.ensure_future(asyncio.to_thread(assets.pull, name, progress=report))

        def ended(done: asyncio.Future[assets.LocalModel]) -> None:
            done.exception()  # looked at, though nobody may be left to read it
            told.put_nowait(None)

        work.add_done_callback(ended)
        yield OllamaProgress(status="pulling manifest")
        while (step := await told.get()) is not None:
            yield step
        model = await work
        yield OllamaProgress(status="verifying sha256 digest")
        digest, size = await asyncio.to_thread(digest_of, model.path), model.size()
        yield OllamaProgress(status=f"pulling {digest[:12]}", digest=f"sha256:{digest}", total=size, completed=size)
        yield OllamaProgress(status="success")
