"""Decoders as data: what an architecture is, how its weights are named and loaded, and its forward pass.

A family (one file each) turns a config into a `DecoderSpec` and weight names into places; one `Model` runs them
all through exchangeable stages. Knows: types, assets' weight sources, kernels. Refuses to know: requests, pages'
owners, sampling.
"""

from quire.kernels.kv import KVViews, allocate_kv
from quire.model.decoder import Model
from quire.model.families import read_spec
from quire.model.loading import compiled_refusal, load_model
from quire.model.native import NativeModel
from quire.model.sizes import parameter_count, weight_bytes
from quire.model.spec import DecoderSpec

__all__ = [
    "DecoderSpec",
    "KVViews",
    "Model",
    "NativeModel",
    "allocate_kv",
    "compiled_refusal",
    "load_model",
    "parameter_count",
    "read_spec",
    "weight_bytes",
]
