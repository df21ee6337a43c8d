"""Tiny random models for the combination fuzzer, written in tens of milliseconds: weights, a tokenizer that can spell
JSON, and draft heads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from quire.generation.drafting.heads import EagleDrafter, MedusaHeads, save_heads
from quire.text.token_bytes import BYTE_ALPHABET

CONTEXT = 96
PRINTABLE = [token for token, byte in sorted(BYTE_ALPHABET.items(), key=lambda item: item[1]) if 32 <= byte < 127]
MERGES = [
    ("t", "h"), ("h", "e"), ("i", "n"), ("a", "n"), ("e", "r"), ("a", "b"), ("ab", "c"), ("1", "0"), ("2", "3"),
    ('"', ":"), ("{", '"'), ('"', "}"), ("o", "n"), ("r", "e"), ("l", "l"), ("th", "e"), ("a", "l"), ("t", "e"),
    ("n", "o"), ("y", "e"), ("ye", "s"), ("x", "y"), ("xy", "z"), ("Ġ", "a"), ("Ġ", "t"), ("q", "u"), ("u", "e"),
    ("s", "t"), ("o", "r"), ("c", "d"), ("k", "v"), ("n", "a"),
]  # fmt: skip
VOCABULARY = [*PRINTABLE, *(a + b for a, b in MERGES), "<eos>"]
EOS = len(VOCABULARY) - 1


@dataclass(frozen=True)
class FuzzModel:
    name: str
    path: str
    exact: bool  # a row's bits do not depend on what runs beside it
    windows: bool  # some layers have sliding windows
    kv_dtypes: tuple[str, ...]
    heads: dict[str, str]  # draft heads, by kind
    adapters: dict[str, str]  # LoRA adapters, by name


@dataclass(frozen=True)
class _Shape:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    layers: int = 2


def _weights(shape: _Shape, rng: np.random.Generator, qk_norm: bool = False) -> dict[str, np.ndarray]:
    """By the names of transformers' Llama; logits spread enough for answers to differ, and to repeat themselves."""

    def matrix(rows: int, columns: int, size: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * size / np.sqrt(columns)).astype(np.float32)

    def norm(size: int = shape.hidden) -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    found = {
        "model.embed_tokens.weight": matrix(len(VOCABULARY), shape.hidden, 4.0),
        "lm_head.weight": matrix(len(VOCABULARY), shape.hidden, 2.5),
        "model.norm.weight": norm(),
    }
    width, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for i in range(shape.layers):
        at = f"model.layers.{i}"
        found |= {
            f"{at}.self_attn.q_proj.weight": matrix(width, shape.hidden, 1.5),
            f"{at}.self_attn.k_proj.weight": matrix(narrow, shape.hidden, 1.5),
            f"{at}.self_attn.v_proj.weight": matrix(narrow, shape.hidden),
            f"{at}.self_attn.o_proj.weight": matrix(shape.hidden, width),
            f"{at}.mlp.gate_proj.weight": matrix(shape.inner, shape.hidden),
            f"{at}.mlp.up_proj.weight": matrix(shape.inner, shape.hidden),
            f"{at}.mlp.down_proj.weight": matrix(shape.hidden, shape.inner),
            f"{at}.input_layernorm.weight": norm(),
            f"{at}.post_attention_layernorm.weight": norm(),
        }
        if qk_norm:
            found |= {f"{at}.self_attn.{which}_norm.weight": norm(shape.head_dim) for which in "qk"}
    return found


def _quantised(path: Path, shape: _Shape, seed: int) -> None:
    """A GGUF that the compiled decoder runs."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(shape.layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(1000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([1] * EOS + [3])
    writer.add_token_merges([f"{a} {b}" for a, b in MERGES])
    writer.add_eos_token_id(EOS)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.layers)
    for name, weight in _weights(shape, np.random.default_rng(seed)).items():
        kind = gguf.GGMLQuantizationType.Q8_0 if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            names.get_name(name, (".weight",)), gguf.quants.quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _dense(path: Path, shape: _Shape, seed: int, **config: object) -> None:
    """A directory of safetensors that plain torch runs."""
    path.mkdir()
    weights = _weights(shape, np.random.default_rng(seed), qk_norm=config["model_type"] == "qwen3")
    described = {
        "hidden_size": shape.hidden, "intermediate_size": shape.inner, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "vocab_size": len(VOCABULARY), "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 1000.0,
        "eos_token_id": EOS, "tie_word_embeddings": False, **config,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(described))
    save_file(weights, path / "model.safetensors")
    backend = Tokenizer(tokenizer_models.BPE(vocab={t: i for i, t in enumerate(VOCABULARY[:EOS])}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(path / "tokenizer.json"))


def _draft_heads(folder: Path, name: str, shape: _Shape) -> dict[str, str]:
    torch.manual_seed(3)
    words = torch.arange(0, EOS, 3)
    made = {
        "medusa": MedusaHeads(shape.hidden, len(words), len(VOCABULARY), 3),
        "eagle": EagleDrafter(shape.hidden, len(words), len(VOCABULARY), 2, (0,)),
    }
    paths = {}
    for kind, heads in made.items():
        heads.words.ids.copy_(words)
        torch.nn.init.normal_(heads.words.embed)
        paths[kind] = str(folder / f"{name}.{kind}")
        save_heads(heads, paths[kind], {})
    return paths


def _adapters(folder: Path, name: str, shape: _Shape) -> dict[str, str]:
    rng, paths = np.random.default_rng(7), {}
    weights = [(key, value.shape) for key, value in _weights(shape, rng).items() if "_proj" in key]
    for adapter, rank, some in (("a", 3, "self_attn"), ("b", 16, "proj")):
        tensors = {}
        for key, (rows, columns) in weights:
            if some in key:
                at = f"base_model.model.{key.removesuffix('.weight')}"
                for side, size in (("A", (rank, columns)), ("B", (rows, rank))):
                    tensors[f"{at}.lora_{side}.weight"] = (0.2 * rng.standard_normal(size)).astype(np.float32)
        path = folder / f"{name}.{adapter}"
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
        paths[adapter] = str(path)
    return paths


@cache
def fuzz_models(folder: Path) -> dict[str, FuzzModel]:
    """`compiled` gives the same bits however it is run; the others agree up to rounding."""
    quantised = ("auto", "int8", "int8-kivi", "fp8", "int4")
    compiled, dense = _Shape(64, 2, 1, 32, 96), _Shape(32, 4, 2, 8, 48)
    _quantised(folder / "compiled.gguf", compiled, 1)
    _dense(folder / "dense", dense, 2, architectures=["LlamaForCausalLM"], model_type="llama")
    _dense(
        folder / "windows", dense, 5, architectures=["Qwen3ForCausalLM"], model_type="qwen3", use_sliding_window=True,
        sliding_window=13, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return {
        "compiled": FuzzModel(
            "compiled",
            str(folder / "compiled.gguf"),
            True,
            False,
            quantised,
            _draft_heads(folder, "c", compiled),
            _adapters(folder, "c", compiled),
        ),
        "dense": FuzzModel(
            "dense",
            str(folder / "dense"),
            False,
            False,
            ("auto",),
            _draft_heads(folder, "d", dense),
            _adapters(folder, "d", dense),
        ),
        "windows": FuzzModel(
            "windows", str(folder / "windows"), False, True, ("auto",), {}, _adapters(folder, "w", dense)
        ),
    }
