"""Decoders as data: what an architecture is, how its weights are named and loaded, and its forward pass.

A family (one file each) turns a config into a `DecoderSpec`, a list of layers made of blocks, and weight names into
places; one `Model` runs them all through exchangeable stages. Knows: types, assets' weight sources, kernels. Refuses to
know: requests, pages' owners, sampling.
"""

from quire.kernels.kv_views import KVViews, allocate_kv
from quire.model.compiled import CompiledModel
from quire.model.decoder import Model
from quire.model.decoder_spec import DecoderSpec
from quire.model.families.registry import read_spec
from quire.model.loading.load import compiled_refusal, load_model, packed_weights, resident_bytes
from quire.model.loading.memory_estimate import parameter_count, weight_bytes
from quire.model.runnable import Runnable

__all__ = [
    "CompiledModel",
    "DecoderSpec",
    "KVViews",
    "Model",
    "Runnable",
    "allocate_kv",
    "compiled_refusal",
    "load_model",
    "packed_weights",
    "parameter_count",
    "read_spec",
    "resident_bytes",
    "weight_bytes",
]
