"""Names that most decoders share: of tensors in safetensors and GGUF files, and of a GGUF's key-values.

Refuses to know: what norms a family has and where they go; it says so itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.model.decoder_spec import DecoderSpec
from quire.model.families.architecture import IGNORED, Target

Names = Mapping[str, tuple[str, int]]  # name within a layer, of either kind of file → (module, part)

PROJECTIONS: Names = {
    "self_attn.q_proj": ("qkv", 0),
    "attn_q": ("qkv", 0),
    "self_attn.k_proj": ("qkv", 1),
    "attn_k": ("qkv", 1),
    "self_attn.v_proj": ("qkv", 2),
    "attn_v": ("qkv", 2),
    "self_attn.o_proj": ("o", 0),
    "attn_output": ("o", 0),
    "mlp.gate_proj": ("up", 0),
    "ffn_gate": ("up", 0),
    "mlp.up_proj": ("up", 1),
    "ffn_up": ("up", 1),
    "mlp.down_proj": ("down", 0),
    "ffn_down": ("down", 0),
}
QK_NORMS: Names = {
    "self_attn.q_norm": ("q_norm", 0),
    "attn_q_norm": ("q_norm", 0),
    "self_attn.k_norm": ("k_norm", 0),
    "attn_k_norm": ("k_norm", 0),
}
POST_NORMS: Names = {
    "post_attention_layernorm": ("mixer_post_norm", 0),
    "post_attention_norm": ("mixer_post_norm", 0),
    "post_feedforward_layernorm": ("feed_post_norm", 0),
    "post_ffw_norm": ("feed_post_norm", 0),
}
LLAMA_NAMES: Names = {
    **PROJECTIONS,
    **QK_NORMS,
    "input_layernorm": ("mixer_norm", 0),
    "attn_norm": ("mixer_norm", 0),
    "post_attention_layernorm": ("feed_norm", 0),
    "ffn_norm": ("feed_norm", 0),
}
_OUTSIDE = {
    "embed_tokens": "embed",
    "token_embd": "embed",
    "norm": "final_norm",
    "output_norm": "final_norm",
    "lm_head": "head",
    "output": "head",
    "rope_freqs": "rope_divisors",
}
_LAYER = re.compile(r"(?:(?:model\.)?layers|(blk))\.(\d{1,5})\.([a-z0-9_.]+)\.(weight|bias)")
_OTHER = re.compile(r"(?:model\.)?([a-z_]+)\.(weight|bias)")

GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}


def target_of(name: str, spec: DecoderSpec, in_layer: Names, *, norm_offset: float = 0.0) -> Target | None:
    """Where a tensor goes, by the names within a layer; None: no such name. `norm_offset` is added to norms of
    safetensors: conversion to GGUF has done so."""
    if name.endswith("rotary_emb.inv_freq"):  # old files store what we compute
        return Target(IGNORED)
    if match := _LAYER.fullmatch(name):
        gguf, layer, inner, kind = match.groups()
        if inner not in in_layer:
            return None
        module, part = in_layer[inner]
        offset = norm_offset if module.endswith("norm") and not gguf else 0.0
        return Target(f"layers.{int(layer)}.{module}", kind, part, offset=offset)
    match = _OTHER.fullmatch(name)
    if match is None or match[1] not in _OUTSIDE:
        return None
    module = _OUTSIDE[match[1]]
    if module == "head" and spec.tie_embeddings:
        return Target(IGNORED)
    return Target(module, match[2], offset=norm_offset if match[1] == "norm" else 0.0)
