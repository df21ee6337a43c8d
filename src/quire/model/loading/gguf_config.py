"""A GGUF's key-values in the words of a config.json, so that families read one kind of config.

Refuses to know: the file's bytes (assets), tensor names (families).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.types.errors import ModelFileError
from quire.types.seams import TensorInfo


def is_gguf(metadata: Mapping[str, Any]) -> bool:
    return "general.architecture" in metadata


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    arch = metadata["general.architecture"]
    values = {key.removeprefix(f"{arch}."): value for key, value in metadata.items() if key.startswith(f"{arch}.")}
    if "token_embd.weight" not in tensors:
        raise ModelFileError("GGUF file has no tensor 'token_embd.weight'; is it a language model, and complete?")
    shared = {
        "model_type": arch,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    return shared | (_gpt2(values) if arch == "gpt2" else _llama(arch, values, tensors))


def _gpt2(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "n_embd": values.get("embedding_length"),
        "n_layer": values.get("block_count"),
        "n_head": values.get("attention.head_count"),
        "n_inner": values.get("feed_forward_length"),
        "n_positions": values.get("context_length"),
        "layer_norm_epsilon": values.get("attention.layer_norm_epsilon"),
    }


def _llama(arch: str, values: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    hidden, heads = values.get("embedding_length"), values.get("attention.head_count")
    head_dim = values.get("attention.key_length")
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head_dim = hidden // heads
    config = {
        "hidden_size": hidden,
        "intermediate_size": values.get("feed_forward_length"),
        "num_hidden_layers": values.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": values.get("context_length"),
        "rms_norm_eps": values.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": values.get("rope.freq_base"),
        "rope_scaling": _rope_scaling(values, tensors),
        "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
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
    }
