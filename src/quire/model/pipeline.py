"""Pipeline parallelism as data: which layers a stage has, and the decoder that is left of the whole.

The first stage has the embeddings, the final norm and the head beside its layers: hidden states come back to it from
the last stage. Refuses to know: how stages talk, files.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from quire.model.decoder_spec import DecoderSpec
from quire.model.sharding import Shard
from quire.types.errors import ConfigError

LEAST_LAYERS = 2  # of a stage: what is reused at another place is probed in the first two layers

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def stage_layers(count: int, stage: int, stages: int) -> range:
    """Of so many layers, those of a stage: as many as the others have, or one more."""
    return range(stage * count // stages, (stage + 1) * count // stages)


def staged_spec(spec: DecoderSpec, stage: int, stages: int) -> DecoderSpec:
    """What a stage runs; ConfigError says what cannot be divided."""
    if problem := _problem(spec, stages):
        raise ConfigError(f"pipeline_parallel {stages} cannot divide {spec.architecture}: {problem}")
    own = stage_layers(len(spec.layers), stage, stages)
    return replace(spec, layers=spec.layers[own.start : own.stop])


def _problem(spec: DecoderSpec, stages: int) -> str:
    if len(spec.layers) < LEAST_LAYERS * stages:
        return f"{len(spec.layers)} layers are fewer than {LEAST_LAYERS} for each stage"
    if spec.encoder:
        return "an encoder computes whole sequences at once"
    if spec.layer_input or any(mixer.kv_from is not None for mixer in spec.attending.values()):
        return "its layers share embeddings, keys and values across stages"
    own = [stage_layers(len(spec.layers), stage, stages) for stage in range(stages)]
    kept = [replace(spec, layers=spec.layers[some.start : some.stop]) for some in own]
    layouts = [part.kv_layout(page_size=16, dtype="float32") for part in kept]
    pages = {
        (bool(layout.states), *((g.tokens_per_page, g.window, g.kv_heads, g.head_dim) for g in layout.groups))
        for layout in layouts
    }
    return "its stages would have KV pages of different kinds" if len(pages) > 1 else ""


def own_module(name: str, count: int, stage: int, stages: int) -> str | None:
    """What a stage calls a module of the whole; None: it has none of it."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    own, layer = stage_layers(count, stage, stages), int(match[1])
    return f"layers.{layer - own.start}.{match[2]}" if layer in own else None


def stage_shards(stage: int) -> dict[str, Shard]:
    """By module, of those that only the first stage has: the others have no rows of them."""
    nothing = Shard(torch.arange(0))
    return {} if stage == 0 else dict.fromkeys(("embed", "head", "positions", "token_types"), nothing)
