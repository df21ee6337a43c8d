"""The multi-token-prediction layer of a checkpoint, which the model itself leaves out, as a model of one layer.

    DeepSeek V3, GLM-4.5   model.layers.N.* behind the last layer: enorm, hnorm, eh_proj, a decoder layer, shared_head
    Qwen3-Next, Qwen3.5    mtp.*: pre_fc_norm_embedding, pre_fc_norm_hidden, fc, layers.0, norm

Its input is a projection of the embedding of a token, and of the hidden state that the token was sampled from.
Embeddings and head are the model's own where the layer has none. Refuses to know: how it drafts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace as with_fields

from quire.model.decoder import Model
from quire.model.decoder_spec import Attending, DecoderSpec, Experts, LayerSpec
from quire.model.families.registry import read_family
from quire.model.loading.expert_tensors import ExpertTensors
from quire.model.loading.formats.published_source import unquantised
from quire.model.loading.load import check_targets, fill_weights, targets_of
from quire.model.loading.stored_tensor import StoredTensor
from quire.types.errors import ConfigError, ModelFileError
from quire.types.seams import TensorInfo, WeightSource

EMBED, HEAD, NORM, LAYER = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.0."
_BEHIND = {  # the last layer
    "enorm.weight": "embed_norm",
    "hnorm.weight": "hidden_norm",
    "eh_proj.weight": "project",
    "shared_head.norm.weight": NORM,
    "shared_head.head.weight": HEAD,
    "embed_tokens.weight": EMBED,
}
_APART = {  # under mtp.
    "pre_fc_norm_embedding.weight": "embed_norm",
    "pre_fc_norm_hidden.weight": "hidden_norm",
    "fc.weight": "project",
    "norm.weight": NORM,
}


@dataclass(frozen=True)
class MtpLayer:
    model: Model  # of one layer, its norm and its head
    project: torch.Tensor  # [hidden, 2 hidden]: of the token's embedding, then of the state
    embed_norm: torch.Tensor
    hidden_norm: torch.Tensor
    goes_on_normed: bool  # whether the state it hands on is that behind its norm


class _Renamed:
    """A WeightSource of some tensors of another, by other names."""

    def __init__(self, source: WeightSource, names: dict[str, str]):
        self._source = source
        self._names = names  # ours → the source's

    def metadata(self) -> dict[str, Any]:
        return self._source.metadata()

    def tensors(self) -> dict[str, TensorInfo]:
        tensors = self._source.tensors()
        return {ours: with_fields(tensors[theirs], name=ours) for ours, theirs in self._names.items()}

    def read(self, name: str) -> np.ndarray:
        return self._source.read(self._names[name])


def load_mtp(source: WeightSource, *, device: torch.device, dtype: torch.dtype, length: int) -> MtpLayer:
    """`source`: the checkpoint of the model that is to be drafted for."""
    family, spec = read_family(source)
    source = unquantised(source, blocks=False)
    names = _names(source, len(spec.layers))
    one = replace(spec, layers=(_layer(spec),))
    parts = {name: names.pop(name, None) for name in ("project", "embed_norm", "hidden_norm")}
    if None in parts.values():
        missing = ", ".join(name for name, theirs in parts.items() if theirs is None)
        raise ModelFileError(f"the multi-token-prediction layer of {spec.architecture} lacks tensors: {missing}")
    layer = ExpertTensors(_Renamed(source, names))
    targets = targets_of(family, one, layer)
    check_targets(targets, Model(one, device=torch.device("meta"), dtype=dtype), layer)
    model = Model(one, device=device, dtype=dtype, length=length)
    fill_weights(model, targets, layer, None)
    model.finish()
    offset = family.target(NORM, one)

    def plain(name: str, *shape: int) -> torch.Tensor:
        theirs, out = parts[name], torch.empty(shape, device=device, dtype=dtype)
        assert theirs is not None
        info = source.tensors()[theirs]
        if info.shape != shape:
            raise ModelFileError(f"tensor {theirs!r} has shape {info.shape}, the model's config needs {shape}")
        added = offset.offset if offset is not None and len(shape) == 1 else 0.0
        StoredTensor(info, source.read(theirs), offset=added).copy_into(out)
        return out

    hidden = spec.hidden
    return MtpLayer(
        model,
        plain("project", hidden, 2 * hidden),
        plain("embed_norm", hidden),
        plain("hidden_norm", hidden),
        goes_on_normed="mtp." in str(parts["project"]),
    )


def _names(source: WeightSource, layers: int) -> dict[str, str]:
    """Names as a model of one layer would have them, and of the projection's parts → as they are in the source."""
    behind, apart = re.compile(rf"(?:model\.)?layers\.{layers}\.(.+)"), re.compile(r"(?:model\.)?mtp\.(.+)")
    found: dict[str, str] = {}
    for name in source.tensors():
        if match := behind.fullmatch(name):
            found[_BEHIND.get(match[1], LAYER + match[1])] = name
        elif match := apart.fullmatch(name):
            inner = match[1]
            found[_APART.get(inner, LAYER + inner.removeprefix("layers.0."))] = name
    if not found:
        raise ConfigError("speculation mtp needs a checkpoint with a multi-token-prediction layer; this one has none")
    for shared in (EMBED, HEAD):
        if shared not in found and shared in source.tensors():
            found[shared] = shared
    return found


def _layer(spec: DecoderSpec) -> LayerSpec:
    """As the last layer that attends: with experts, where such a one has them."""
    attending = [layer for layer in spec.layers if isinstance(layer.mixer, Attending) and layer.feed is not None]
    experts = [layer for layer in attending if isinstance(layer.feed, Experts)]
    return (experts or attending)[-1]
