"""The default model's text side and, as the oracle, what transformers makes of the same file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.assets import LocalModel
from quire.text import TextModel


@pytest.fixture(scope="session")
def default_text(default_model: LocalModel) -> TextModel:
    return TextModel.load(default_model)


@pytest.fixture(scope="session")
def transformers_tokenizer() -> Callable[[Path], Any]:
    """What transformers makes of a GGUF file's tokenizer."""
    from transformers import AutoTokenizer

    return lambda path: AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.fixture(scope="session")
def theirs(default_model: LocalModel, transformers_tokenizer: Callable[[Path], Any]) -> Any:
    return transformers_tokenizer(default_model.path)
