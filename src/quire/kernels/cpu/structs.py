"""The C structs of csrc/common.h, kernels.h, decoder.h and sampling.h, field by field, and how weights get into them.

Refuses to know: what the numbers mean.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, Structure, c_bool, c_float, c_int32, c_int64, c_void_p
from typing import Any, ClassVar

import torch


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Matrix(Structure):
    _fields_: ClassVar = [("data", c_void_p), *_fields(c_int32, "n k form")]


class Norm(Structure):
    _fields_: ClassVar = [*_fields(c_void_p, "weight bias"), ("eps", c_float), ("centred", c_int32)]


class GatedNorm(Structure):
    _fields_: ClassVar = [
        ("weight", c_void_p),
        *_fields(c_int32, "width part weights"),
        ("eps", c_float),
        ("gate_first", c_bool),
    ]


class Linear(Structure):
    _fields_: ClassVar = [("w", Matrix), ("bias", c_void_p)]


class Rotation(Structure):
    _fields_: ClassVar = [("inverse_frequencies", c_void_p), ("half", c_int32), ("scale", c_float)]


class Attention(Structure):
    _fields_: ClassVar = [
        *_fields(Linear, "q gate k v o"),
        *_fields(Norm, "q_norm k_norm v_norm"),
        ("sinks", c_void_p),
        *_fields(c_int32, "heads kv_heads head_dim rotation norms_all window chunked sparse kv_group place"),
        *_fields(c_int32, "scaling_period scaling_offset"),
        *_fields(c_float, "scaling_weight scale softcap"),
    ]


class Latent(Structure):
    _fields_: ClassVar = [
        *_fields(Linear, "q_down q_up kv_down k_rotary o"),
        *_fields(POINTER(Matrix), "k_up v_up"),
        *_fields(Norm, "q_norm kv_norm"),
        *_fields(c_int32, "heads rank rest rotary value_dim rotation kv_group place"),
        ("scale", c_float),
    ]


class State(Structure):
    _fields_: ClassVar = _fields(c_void_p, "window matrix")


class Convolution(Structure):
    _fields_: ClassVar = [*_fields(c_void_p, "weight bias"), *_fields(c_int32, "taps channels")]


class GatedDelta(Structure):
    _fields_: ClassVar = [
        *_fields(Linear, "q k v z o"),
        *_fields(c_void_p, "ba decay dt_bias"),
        ("conv", Convolution),
        ("norm", GatedNorm),
        ("state", State),
        *_fields(c_int32, "key_heads value_heads key_dim value_dim tiled"),
    ]


class Mamba2(Structure):
    _fields_: ClassVar = [
        *_fields(Linear, "gate xbc dt o"),
        *_fields(c_void_p, "decay dt_bias d"),
        ("conv", Convolution),
        ("norm", GatedNorm),
        ("state", State),
        *_fields(c_int32, "heads head_dim groups state_size"),
        *_fields(c_float, "dt_least dt_most"),
    ]


class ShortConv(Structure):
    _fields_: ClassVar = [*_fields(Linear, "b c x o"), ("conv", Convolution), ("state", State)]


class Mlp(Structure):
    _fields_: ClassVar = [*_fields(Linear, "gate up down"), *_fields(c_int32, "width activation")]


class Router(Structure):
    _fields_: ClassVar = [
        *_fields(c_void_p, "weight bias correction scales"),
        *_fields(c_int32, "sigmoid normalised weighs_input groups top_groups best_two"),
        *_fields(c_float, "logit_scale scale"),
    ]


class Experts(Structure):
    _fields_: ClassVar = [
        ("router", Router),
        ("expert", POINTER(Mlp)),
        ("shared", Mlp),
        ("shared_gate", c_void_p),
        *_fields(Norm, "router_norm norm post_norm shared_post_norm"),
        *_fields(c_int32, "count top_k"),
    ]


class LayerInput(Structure):
    _fields_: ClassVar = [*_fields(Linear, "gate up"), ("norm", Norm), ("activation", c_int32), ("scale", c_float)]


class Layer(Structure):
    _fields_: ClassVar = [
        ("attention", POINTER(Attention)),
        ("latent", POINTER(Latent)),
        ("delta", POINTER(GatedDelta)),
        ("mamba", POINTER(Mamba2)),
        ("conv", POINTER(ShortConv)),
        ("mlp", POINTER(Mlp)),
        ("experts", POINTER(Experts)),
        ("input", POINTER(LayerInput)),
        *_fields(Norm, "mixer_norm mixer_post_norm feed_norm feed_post_norm"),
        ("parallel", c_int32),
    ]


class Decoder(Structure):
    _fields_: ClassVar = [
        *_fields(c_int32, "hidden layers rotations"),
        *_fields(c_float, "embedding_scale residual_scale logit_scale logit_softcap"),
        *_fields(Matrix, "embed head"),
        ("positions", c_void_p),
        *_fields(c_int32, "most_positions position_offset"),
        ("final_norm", Norm),
        ("rotation", POINTER(Rotation)),
        ("layer", POINTER(Layer)),
        *_fields(Matrix, "input_table input_product"),
        ("input_norm", Norm),
        ("input_width", c_int32),
    ]


class LowRank(Structure):
    _fields_: ClassVar = [*_fields(Matrix, "a b"), ("scale", c_float)]


class AdapterLayer(Structure):
    _fields_: ClassVar = _fields(LowRank, "q attention_gate k v o gate up down")


class StepGroup(Structure):
    _fields_: ClassVar = [
        ("page_table", c_void_p),
        ("table_stride", c_int64),
        ("kv_slots", c_void_p),
        *_fields(c_int32, "tokens_per_page layers"),
        ("bounds", c_void_p),
        *_fields(c_int32, "kind latest parts"),
    ]


LAYER_WRITTEN = CFUNCTYPE(None, c_int32)


class Step(Structure):
    _fields_: ClassVar = [
        *_fields(c_int32, "tokens rows"),
        *_fields(c_void_p, "ids positions query_start"),
        ("group", POINTER(StepGroup)),
        *_fields(c_int32, "groups residual"),
        ("pool", c_void_p),
        *_fields(c_int64, "pages page_bytes"),
        *_fields(c_void_p, "segments rounds"),
        *_fields(c_int32, "round_count cells"),
        ("cell_stride", c_int64),
        ("hidden", c_void_p),
        ("layers", c_int32),
        *_fields(c_void_p, "taps tapped"),
        ("tap_count", c_int32),
        *_fields(c_void_p, "tree_base tree_path asks mass"),
        *_fields(c_int32, "mass_runs mass_tokens"),
        ("adapters", c_void_p),
        ("adapter", POINTER(POINTER(AdapterLayer))),
        *_fields(c_int32, "adapter_count adapter_rank"),
        ("sparse", c_void_p),
        ("sparse_local", c_int32),
        ("observed", c_void_p),
        ("written", LAYER_WRITTEN),
    ]


class Sampling(Structure):
    _fields_: ClassVar = [
        ("logits", c_void_p),
        ("stride", c_int64),
        *_fields(c_int32, "vocab rows"),
        *_fields(c_void_p, "slots positions asked numbers bias_ids bias_values stop_ids tokens"),
        ("token_stride", c_int64),
        *_fields(c_int32, "biases stops top"),
        *_fields(c_void_p, "counts drawn scores"),
    ]


# Whose sizes the library is asked for: it would read other numbers than were meant.
CHECKED: tuple[type[Structure], ...] = (
    Matrix, Attention, Latent, GatedDelta, Mamba2, ShortConv, Mlp, Experts, LayerInput, Layer, Decoder, AdapterLayer,
    StepGroup, Step, Sampling,
)  # fmt: skip


def fill(kind: type[Structure], weights: Any, keep: list[Any]) -> Any:
    """A struct from an object with attributes of the same names: numbers as they are, tensors as pointers to floats,
    objects as structs, lists as arrays; None leaves zeros. What is pointed at is put into `keep`."""
    out = kind()
    for name, field in kind._fields_:  # type: ignore[misc]
        value = getattr(weights, name)
        if value is not None:
            setattr(out, name, _value(field, value, keep))
    return out


def _value(kind: Any, value: Any, keep: list[Any]) -> Any:
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, torch.Tensor):
        floats = value.float().contiguous()
        keep.append(floats)
        return floats.data_ptr()
    if issubclass(kind, Structure):
        return value.struct if hasattr(value, "struct") else fill(kind, value, keep)
    pointed = kind._type_
    items = value if isinstance(value, list) else [value]
    array = (pointed * len(items))(*(_value(pointed, item, keep) for item in items))
    keep.append(array)
    return ctypes.cast(array, kind)
