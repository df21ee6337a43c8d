"""The seam of a model family, and the reading of configs that all families share.

A family says which names it answers to, what a config means, and where each stored tensor goes. Refuses to
know: how tensors are read, how the model runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quire.model.blocks.rope_scaling import check_rope
from quire.model.decoder_spec import DecoderSpec, RopeSpec
from quire.model.loading.stored_tensor import RowOrder, StoredTensor
from quire.types.errors import ModelFileError
from quire.types.seams import TensorInfo

IGNORED = "ignored"  # module of a Target whose tensor the model does not need
OTHER_MODALITY = "other modality"  # of one that only pictures or sound would need


@dataclass(frozen=True)
class Target:
    """Where a stored tensor goes: `kind` (weight or bias) of `module`, from `part` of a stacked matrix on."""

    module: str  # "embed", "layers.3.qkv", ...
    kind: str = "weight"
    part: int = 0
    transposed: bool = False
    order: RowOrder | None = None
    offset: float = 0.0  # added to what is stored
    negated_exp: bool = False  # what is stored is -exp of it

    def stored(self, info: TensorInfo, raw: np.ndarray) -> StoredTensor:
        """The tensor as the model wants it."""
        return StoredTensor(
            info,
            raw,
            transposed=self.transposed,
            order=self.order,
            offset=self.offset,
            negated_exp=self.negated_exp,
        )


class Architecture(Protocol):
    names: tuple[str, ...]  # class names and model types in config.json
    gguf_names: tuple[str, ...]  # values of general.architecture
    gguf_keys: Mapping[str, str]  # name in a config → key in a GGUF, less the architecture it begins with

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        """What a config.json (or a GGUF's key-values in its words) describes."""
        ...

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        """Where the tensor of this name (safetensors or GGUF spelling) goes; None: no such name in this family."""
        ...


def named_in(config: Mapping[str, Any]) -> Any:
    """The name of the architecture in a config.json: a class name, or a model type where none is given."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names else config.get("model_type")


class Fields:
    """Checked access to a config: a wrong or missing value is named, never guessed around."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config

    def raw(self, name: str) -> Any:
        return self.config.get(name)

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = 1 << 16) -> int:
        """Bounded, so that a config alone cannot make us build without end."""
        value = self.config.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ModelFileError(f"model config: {name!r} should be an integer from {least} to {most}, got {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
            raise ModelFileError(f"model config: {name!r} should be a positive number, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name)
        return default if value is None else bool(value)

    def mapping(self, *names: str) -> Mapping[str, Any]:
        """Of several names for the same, the first that says something."""
        value: Any = next((self.config[name] for name in names if self.config.get(name)), {})
        if not isinstance(value, Mapping):
            raise ModelFileError(f"model config: {' or '.join(names)} should be an object, got {value!r}")
        return value

    def integers(self, name: str) -> list[int]:
        value = self.config.get(name) or []
        if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
            raise ModelFileError(f"model config: {name!r} should be a list of integers, got {value!r}")
        return value

    def choice(self, name: str, default: str, known: Mapping[str, Any]) -> Any:
        value = self.config.get(name) or default
        if not isinstance(value, str) or value not in known:
            raise ModelFileError(f"model config: {name} {value!r} is not supported; known: {', '.join(known)}")
        return known[value]


def rope_spec(config: Mapping[str, Any], head_dim: int, max_position: int, layer_type: str | None = None) -> RopeSpec:
    """From `rope_parameters` (newer configs; where they differ, those of a type of layers) or `rope_theta` and
    `rope_scaling` (older ones)."""
    said = Fields(config).mapping("rope_parameters", "rope_scaling")
    if layer_type is not None and isinstance(said.get(layer_type), Mapping):
        said = said[layer_type]
    if any(isinstance(value, Mapping) for value in said.values()):
        raise ModelFileError(f"model config: RoPE parameters should be one set of values, got {said!r}")
    params = dict(said)
    kinds = [params.pop(name, None) for name in ("rope_type", "type")]
    kind = str(next((kind for kind in kinds if kind), "default"))
    kind = {"su": "longrope", "none": "default"}.get(kind, kind)
    for name in [name for name, value in params.items() if value is None]:
        del params[name]
    theta = Fields(params).number("rope_theta", Fields(config).number("rope_theta", 10000.0))
    partial = Fields(params).number("partial_rotary_factor", Fields(config).number("partial_rotary_factor", 1.0))
    if config.get("original_max_position_embeddings"):
        params["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    original = params.setdefault("original_max_position_embeddings", max_position)
    if kind == "yarn" and isinstance(original, int) and original > 0:
        params.setdefault("factor", max_position / original)
    dim = head_dim if kind == "proportional" else int(head_dim * partial)
    rope = RopeSpec(theta=theta, dim=dim, kind=kind, params=params)
    if rope.dim > head_dim:
        raise ModelFileError(f"model config: RoPE cannot rotate {rope.dim} dimensions of heads of {head_dim}")
    check_rope(rope, max_position)
    return rope


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
