"""GPT-2: LayerNorms, learned positions, plain multi-head attention, ungated MLP, biases everywhere. Its
checkpoints store matrices as [in, out]; GGUF turned them round.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.decoder_spec import Attention, DecoderSpec, Dense, LayerSpec, Norms
from quire.model.families.architecture import ACTIVATIONS, IGNORED, Fields, Target

_IN_LAYER = {
    "ln_1": "mixer_norm",
    "attn_norm": "mixer_norm",
    "attn.c_attn": "qkv",
    "attn_qkv": "qkv",
    "attn.c_proj": "o",
    "attn_output": "o",
    "ln_2": "feed_norm",
    "ffn_norm": "feed_norm",
    "mlp.c_fc": "up",
    "ffn_up": "up",
    "mlp.c_proj": "down",
    "ffn_down": "down",
}
_OUTSIDE = {
    "wte": "embed",
    "token_embd": "embed",
    "wpe": "positions",
    "position_embd": "positions",
    "ln_f": "final_norm",
    "output_norm": "final_norm",
    "lm_head": "head",
    "output": "head",
}
_LAYER = re.compile(r"(?:(?:transformer\.)?h|(blk))\.(\d{1,5})\.([a-z_0-9.]+)\.(weight|bias)")
_MASK = re.compile(r"(?:transformer\.)?h\.\d+\.attn\.(?:masked_)?bias")  # old files store the causal mask
_OTHER = re.compile(r"(?:transformer\.)?([a-z_]+)\.(weight|bias)")


class Gpt2Family:
    names: tuple[str, ...] = ("GPT2LMHeadModel", "gpt2")
    gguf_names: tuple[str, ...] = ("gpt2",)
    gguf_keys: Mapping[str, str] = {
        "n_embd": "embedding_length",
        "n_layer": "block_count",
        "n_head": "attention.head_count",
        "n_inner": "feed_forward_length",
        "n_positions": "context_length",
        "layer_norm_epsilon": "attention.layer_norm_epsilon",
    }

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        fields = Fields(config)
        hidden, layers = fields.integer("n_embd", most=1 << 20), fields.integer("n_layer", most=4096)
        heads = fields.integer("n_head", most=hidden)
        head_dim = hidden // heads
        scale = head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
        by_depth = fields.flag("scale_attn_by_inverse_layer_idx")
        attention = Attention(heads=heads, kv_heads=heads, head_dim=head_dim, scale=scale, qkv_bias=True, o_bias=True)
        feed = Dense(
            intermediate=fields.integer("n_inner", 4 * hidden, most=1 << 24),
            activation=fields.choice("activation_function", "gelu_new", ACTIVATIONS),
            gated=False,
            bias=True,
        )
        norms = Norms("layer", fields.number("layer_norm_epsilon", 1e-5), bias=True)
        scales = [scale / (i + 1) if by_depth else scale for i in range(layers)]
        return DecoderSpec(
            architecture="gpt2",
            vocab_size=fields.integer("vocab_size", most=1 << 24),
            hidden=hidden,
            max_position=fields.integer("n_positions", most=1 << 30),
            layers=tuple(LayerSpec(replace(attention, scale=each), feed, norms) for each in scales),
            tie_embeddings=fields.flag("tie_word_embeddings", True),
            learned_positions=True,
        )

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        if _MASK.fullmatch(name):
            return Target(IGNORED)
        if match := _LAYER.fullmatch(name):
            gguf, layer, inner, kind = match.groups()
            module = _IN_LAYER.get(inner)
            if module is None:
                return None
            matrix = kind == "weight" and "norm" not in module
            return Target(f"layers.{int(layer)}.{module}", kind, transposed=matrix and not gguf)
        match = _OTHER.fullmatch(name)
        if match is None or match[1] not in _OUTSIDE:
            return None
        module = _OUTSIDE[match[1]]
        return Target(IGNORED if module == "head" and spec.tie_embeddings else module, match[2])


FAMILY = Gpt2Family()
