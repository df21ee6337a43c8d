"""Falcon: LayerNorms, multi-query (or grouped) attention beside an ungated MLP, queries, keys and values stored as one
matrix. Falcon 7B has one norm for both, 40B and 180B one each; Falcon 3 is a Llama and says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from quire.model.decoder_spec import DecoderSpec, LayerSpec, Norms
from quire.model.families.architecture import ACTIVATIONS, Target
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.tensor_names import target_of
from quire.model.loading.stored_tensor import Ungrouped
from quire.types.errors import ModelFileError

_NAMES = {
    "self_attention.query_key_value": ("qkv", 0),
    "attn_qkv": ("qkv", 0),
    "self_attention.dense": ("o", 0),
    "attn_output": ("o", 0),
    "mlp.dense_h_to_4h": ("up", 0),
    "ffn_up": ("up", 0),
    "mlp.dense_4h_to_h": ("down", 0),
    "ffn_down": ("down", 0),
    "input_layernorm": ("mixer_norm", 0),
    "ln_attn": ("mixer_norm", 0),
    "post_attention_layernorm": ("feed_norm", 0),
    "ln_mlp": ("feed_norm", 0),
}
_OUTSIDE = {"h": "layers", "word_embeddings": "embed_tokens", "ln_f": "norm"}


class FalconFamily:
    names: tuple[str, ...] = ("FalconForCausalLM", "falcon", "RWForCausalLM", "RefinedWebModel", "RefinedWeb")
    gguf_names: tuple[str, ...] = ()
    gguf_keys: Mapping[str, str] = {}

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        config = dict(config)
        for name, older in (("num_attention_heads", "n_head"), ("num_hidden_layers", "n_layer")):
            config[name] = config.get(name) or config.get(older)
        grouped = bool(config.get("new_decoder_architecture"))
        heads = config.get("num_attention_heads")
        one = bool(config.get("multi_query", True)) and not grouped
        config["num_key_value_heads"] = 1 if one else (config.get("num_kv_heads") or config.get("n_head_kv") or heads)
        fields = DecoderConfig(config)
        if fields.flag("alibi"):
            raise ModelFileError("model config: Falcon with ALiBi positions is not supported")
        bias, norms = fields.flag("bias"), Norms("layer", fields.number("layer_norm_epsilon", 1e-5), bias=True)
        parallel: Literal["own_norms", "one_norm"] | None = None
        if grouped and fields.integer("num_ln_in_parallel_attn", 2) == 2:
            parallel = "own_norms"
        elif grouped or fields.flag("parallel_attn", True):
            parallel = "one_norm"
        feed = fields.dense(
            intermediate=fields.integer("ffn_hidden_size", 4 * fields.hidden, most=1 << 24),
            activation=fields.choice("activation", "gelu", ACTIVATIONS),
            gated=False,
            bias=bias,
        )
        layer = LayerSpec(fields.attention(qkv_bias=bias, o_bias=bias), feed, norms, parallel)
        return fields.decoder(
            "falcon", (layer,) * fields.layers, tie_embeddings=fields.flag("tie_word_embeddings", True)
        )

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        first, _, rest = name.removeprefix("transformer.").partition(".")
        target = target_of(f"{_OUTSIDE.get(first, first)}.{rest}", spec, _NAMES)
        mixer = spec.attention
        if target is None or not target.module.endswith(".qkv") or mixer.kv_heads == 1:
            return target
        queries = mixer.heads // mixer.kv_heads * mixer.head_dim
        return replace(target, order=Ungrouped(mixer.kv_heads, (queries, mixer.head_dim, mixer.head_dim)))


FAMILY = FalconFamily()
