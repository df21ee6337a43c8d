"""What a build of the kernels calls itself: setup.py writes it, whoever opens the library compares it.

Imports nothing of this package, which is not installed yet when setup.py runs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest(sources: Path) -> str:
    """What a build from these sources, if there are any, is to call itself."""
    files = sorted([*sources.glob("*.cpp"), *sources.glob("*.h")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16] if files else ""
