"""Quire: an LLM inference engine and server.

>>> from quire import LLM, SamplingParams
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.types.beam import BeamParams
from quire.types.blend import BlendParams
from quire.types.grammar import GrammarSpec
from quire.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.frontend import AsyncLLM
    from quire.engine.llm import LLM

__version__ = "0.2.0"  # the one place; the package's metadata is made from it
__all__ = ["LLM", "AsyncLLM", "BeamParams", "BlendParams", "GrammarSpec", "SamplingParams", "__version__"]

_LAZY = {"LLM": "quire.engine.llm", "AsyncLLM": "quire.engine.frontend"}


def __dir__() -> list[str]:
    """What is meant to be used, for completion; those that load on first use among it."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Heavy names load on first use, so that `import quire` stays quick."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
