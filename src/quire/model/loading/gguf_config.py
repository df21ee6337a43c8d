"""A GGUF's key-values in the words of a config.json, so that families read one kind of config.

Refuses to know: the file's bytes (assets), tensor names (families).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.types.errors import ModelFileError
from quire.types.seams import TensorInfo

_HEAD_KEYS = ("embedding_length", "attention.head_count", "attention.key_length")


def is_gguf(metadata: Mapping[str, Any]) -> bool:
    return "general.architecture" in metadata


def config_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], keys: Mapping[str, str]
) -> dict[str, Any]:
    """`keys`: the family's names of its config → the file's, less the architecture they begin with."""
    arch = metadata["general.architecture"]
    values = {key.removeprefix(f"{arch}."): value for key, value in metadata.items() if key.startswith(f"{arch}.")}
    if "token_embd.weight" not in tensors:
        raise ModelFileError("GGUF file has no tensor 'token_embd.weight'; is it a language model, and complete?")
    config = {name: values.get(key) for name, key in keys.items()} | {
        "model_type": arch,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in tensors),
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "conv_bias": any(name.endswith((".shortconv.conv.bias", ".ssm_conv1d.bias")) for name in tensors),
        "use_qk_norm": any(name.endswith(".attn_q_norm.weight") for name in tensors),
        "rope_scaling": _rope_scaling(values, tensors),
    }
    for name, said in (("num_key_value_heads", "kv_heads_by_layer"), ("intermediate_size", "feeds_by_layer")):
        if isinstance(by_layer := config.get(name), list):  # layers without any have 0
            config |= {said: by_layer, name: max(by_layer, default=None)}
    hidden, heads, head_dim = (values.get(key) for key in _HEAD_KEYS)
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head_dim = hidden // heads
    config["head_dim"] = head_dim
    rotated = values.get("rope.dimension_count")
    if isinstance(rotated, int) and isinstance(head_dim, int) and head_dim > 0:
        config["partial_rotary_factor"] = rotated / head_dim
    if arch == "llama" and values.get("attention.sliding_window"):
        config |= {"model_type": "mistral", "sliding_window": values["attention.sliding_window"]}
    return config


def _rope_scaling(values: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
    kind = values.get("rope.scaling.type") or "none"
    if "rope_freqs.weight" in tensors:  # Llama 3: the scaling is worked out and stored, one divisor a frequency
        if kind != "none":
            raise ModelFileError(f"GGUF file has both 'rope_freqs.weight' and RoPE scaling {kind!r}; one is supported")
        return {"rope_type": "divisors"}
    if kind == "none":
        return None
    return {
        "rope_type": kind,
        "factor": values.get("rope.scaling.factor"),
        "original_max_position_embeddings": values.get("rope.scaling.original_context_length"),
        "beta_fast": values.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": values.get("rope.scaling.yarn_beta_slow"),
        "yarn_log_multiplier": values.get("rope.scaling.yarn_log_multiplier"),
    }
