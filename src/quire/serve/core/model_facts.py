"""What can be told of a model of this server, loaded or not: by its engine if it ever had one, else by its files.

Refuses to know: in which words.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from quire.assets import describe, present
from quire.engine.frontend import Frontend
from quire.serve.core.server_state import Serving
from quire.text import TextModel
from quire.types.errors import ModelNotFoundError
from quire.types.messages import WeightsInfo
from quire.types.models_file import ServedModel


@dataclass(frozen=True)
class ModelFacts:
    name: str
    model: str  # what it was loaded from
    weights: WeightsInfo
    max_model_len: int
    vocab_size: int = 0  # of one that was never loaded, its tokenizer tells
    device: str = ""
    text: TextModel | None = None


async def facts_of(serving: Serving, name: str) -> ModelFacts:
    if (frontend := serving.models.latest(name)) is not None:
        return _of_engine(frontend)
    return await asyncio.to_thread(_of_files, serving.models.spec(name))


async def text_of(facts: ModelFacts) -> TextModel:
    """Its tokenizer and template, read for this once if it was never loaded."""
    if facts.text is not None:
        return facts.text
    local = present(facts.model)
    if local is None:
        raise ModelNotFoundError(f"the files of {facts.model} are gone")
    return await asyncio.to_thread(TextModel.load, local)


def _of_engine(frontend: Frontend) -> ModelFacts:
    info = frontend.client.info
    return ModelFacts(
        frontend.model_name,
        info.model,
        info.weights,
        info.max_model_len,
        info.vocab_size,
        info.device,
        frontend.text,
    )


def _of_files(spec: ServedModel) -> ModelFacts:
    options = spec.engine.model
    local = present(options.model)
    weights = describe(local).weights() if local is not None else WeightsInfo()  # gone since the start
    return ModelFacts(spec.name, options.model, weights, options.max_model_len or weights.context_length)
