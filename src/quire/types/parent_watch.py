"""A child process that ends with its parent, however the parent ended."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

LOOK_S = 0.5  # between looks


def end_with_parent(parent: int, directory: Path | None = None) -> None:
    """A thread that ends this process, and what it would leave behind, as soon as its parent is gone: however the
    parent ended, and whatever this process is busy with."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="quire-parent", daemon=True).start()
