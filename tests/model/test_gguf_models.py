"""GGUF files of every family: written by the gguf package as llama.cpp converts them, logits as before conversion."""

from __future__ import annotations

import re

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_hybrids import convert_hybrid, pair_heads
from k_quantizer import quantize_k
from model_harness import run_model
from tiny_models import prompts, their_logits, tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire.assets import resolve
from quire.kernels import cpu
from quire.kernels.cpu import matrix_packing
from quire.model import load_model
from quire.model.blocks.rope_scaling import inverse_frequencies

CPU = {"device": "cpu", "dtype": torch.float32}
GPT2_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def convert(model: PreTrainedModel, path: str, kind: GGMLQuantizationType = GGMLQuantizationType.F32) -> None:
    config, arch = model.config, model.config.model_type.replace("_moe", "moe").replace("_text", "")
    paired = arch in ("llama", "granite", "smollm3")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if arch == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_feed_forward_length(config.intermediate_size)
        if arch == "cohere2":
            writer.add_layer_norm_eps(config.layer_norm_eps)
            writer.add_logit_scale(config.logit_scale)
        else:
            writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_head_count_kv(config.num_key_value_heads)
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_freq_base(rope["rope_theta"])
    if arch == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch.endswith("moe"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if arch in ("gemma2", "gemma3", "cohere2"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        weight = tensor.float().numpy()
        if match := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\w+)_proj", name):
            layer, which = match.groups()
            halves = np.split(weight, 2, axis=1) if which == "gate_up" else [weight]
            for part, half in zip(("gate", "up") if which == "gate_up" else ("down",), halves, strict=True):
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", np.ascontiguousarray(half))
            continue
        if name.endswith(GPT2_TRANSPOSED):
            weight = weight.T
        if paired and ".q_proj." in name:
            weight = pair_heads(weight, config.num_attention_heads)
        if paired and ".k_proj." in name:
            weight = pair_heads(weight, config.num_key_value_heads)
        if arch.startswith("gemma") and "norm" in name:
            weight = weight + 1
        stored = kind if weight.ndim == 2 else GGMLQuantizationType.F32
        weight = np.ascontiguousarray(weight)
        known = stored.name in ("Q5_K", "Q6_K")
        data = quantize_k(weight, stored.name) if known else gguf.quants.quantize(weight, stored)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=stored)
    if arch == "llama" and config.rope_parameters["rope_type"] == "llama3":
        scaled = model.model.rotary_emb.inv_freq
        plain = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GGUF_FAMILIES = ["llama2", "llama-biased-tied", "llama3", "one-kv-head", "qwen2", "qwen3", "gpt2", "olmo2", "gemma2"]
GGUF_FAMILIES += ["granite", "phi3-partial", "glm4", "qwen2-moe-everywhere", "qwen3-moe"]
GGUF_FAMILIES += ["smollm3-gguf", "cohere2-gguf", "gemma3-gguf"]
GGUF_HYBRIDS = ["gpt-oss", "granite-moe", "glm4-moe", "llama4-gguf", "deepseek-v2", "deepseek-v3-gguf"]
GGUF_HYBRIDS += ["qwen3-next-gguf", "qwen3.5", "qwen3.5-moe-gguf"]
GGUF_HYBRIDS += ["lfm2", "lfm2-moe", "granite-hybrid", "nemotron-h", "nemotron-h-moe"]


@pytest.mark.parametrize("name", [*GGUF_FAMILIES, *GGUF_HYBRIDS])
def test_logits_survive_conversion(tmp_path, name):
    theirs = tiny(name)
    path = tmp_path / "m.gguf"
    (convert_hybrid if name in GGUF_HYBRIDS else convert)(theirs, str(path))
    ours = load_model(resolve(str(path)).open(), **CPU)
    assert ours.spec.tie_embeddings == theirs.config.tie_word_embeddings
    (prompt,) = prompts(33)
    want = their_logits(theirs, prompt)
    torch.testing.assert_close(run_model(ours, [prompt])[0], want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(run_model(ours, [prompt], chunk=7)[0], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "Q4_0", "MXFP4"])
def test_quantised_files_match_transformers_reading_them(tmp_path, kind):
    theirs = tiny("block-sized")
    path = tmp_path / "m.gguf"
    convert(theirs, str(path), GGMLQuantizationType[kind])
    reread = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    ours = load_model(resolve(str(path)).open(), **CPU)
    (prompt,) = prompts(21)
    torch.testing.assert_close(run_model(ours, [prompt])[0], their_logits(reread, prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kept", ["at its own size", "as this host's kernels want it"])
@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q5_K", "Q6_K"])
def test_compiled_decoder_draws_transformers_greedy_tokens(tmp_path, monkeypatch, kind, kept):
    if reason := cpu.available():
        pytest.skip(reason)
    if kept == "at its own size":
        monkeypatch.setattr(matrix_packing, "AS_BYTES", ())
    path = tmp_path / "m.gguf"
    convert(tiny("super-block-sized"), str(path), GGMLQuantizationType[kind])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    ours = load_model(resolve(str(path)).open(), **CPU, compiled=1)
    assert "compiled" in ours.describe()[0]
    (prompt,) = prompts(21)
    drawn = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0].tolist()
    want, got = their_logits(theirs, drawn)[20:-1], run_model(ours, [drawn])[0][20:-1]
    error = (got - want).square().mean().sqrt()
    assert error < 0.16 * want.std()  # activations are rounded to 8 bits, and these weights are random
    first, second = want.topk(2).values.T
    clear = first - second > 2.5 * error
    assert clear.any()
    assert (got.argmax(-1) == torch.tensor(drawn[21:]))[clear].all()


def test_yarn_keys(tmp_path):
    """RoPE scaling by key-values means what the same config.json means."""
    path = tmp_path / "m.gguf"
    convert(tiny("llama2"), str(path))
    source = resolve(str(path)).open()
    meta = source.metadata() | {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 16,
        "llama.rope.freq_base": 1000.0,
    }
    source.metadata = lambda: meta
    rope = load_model(source, **CPU).spec.layers[0].mixer.rope
    assert rope.kind == "yarn"
    ours, sharpness = inverse_frequencies(rope, 128, 128)
    theirs = tiny("yarn").model.rotary_emb
    torch.testing.assert_close(ours, theirs.inv_freq)
    assert sharpness == pytest.approx(theirs.attention_scaling)


def test_default_model_matches_transformers(default_model, oracle):
    ours = load_model(default_model.open(), **CPU)
    first, second = prompts(50, 23, vocabulary=49152)
    got = run_model(ours, [first, second], chunk=32, page_size=16)
    for logits, prompt in zip(got, (first, second), strict=True):
        want = their_logits(oracle, prompt)
        torch.testing.assert_close(logits, want, atol=1e-3, rtol=1e-3)
        top = want.topk(2).values
        clear = top[:, 0] - top[:, 1] > 1e-3
        assert torch.equal(logits.argmax(-1)[clear], want.argmax(-1)[clear])
