"""LoRA adapters beside each other in one batch: each prompt's logits are those of weights with its adapter merged."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from lora_writer import ATTENTION, MLP, merge, write_adapter
from model_harness import run_model
from safetensors.torch import load_file, save_file
from tiny_models import prompts, their_logits, tiny

from quire.assets import resolve
from quire.model import load_model
from quire.model.families.registry import read_family
from quire.model.loading.lora_adapter import read_adapter
from quire.types.errors import ModelFileError

ALL = ATTENTION + MLP
FAMILIES = {
    "llama3": ALL,
    "llama-biased-tied": ALL,
    "qwen3": ALL,
    "gemma3": ALL,
    "granite": ALL,
    "cohere2": ALL,
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "falcon-40b": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "qwen3.5": (*ALL, "out_proj"),
    "deepseek-v2": ("o_proj",),
}
VARIATIONS = {
    "plain": {},
    "rslora": {"use_rslora": True, "lora_alpha": 3},
    "patterns": {
        "rank_pattern": {"q_proj": 7, "layers.1.mlp.down_proj": 2, "^model.layers.2.self_attn.o_proj": 5},
        "alpha_pattern": {"v_proj": 20, "layers.0.self_attn.q_proj": 1.5},
    },
}


def opened(path, theirs):
    theirs.save_pretrained(path)
    source = resolve(str(path)).open()
    model = load_model(source, device="cpu", dtype=torch.float32, quantize="none")
    model.reserve_adapters(3, 8)
    return source, model


def merged_logits(theirs, adapter, prompt):
    theirs = copy.deepcopy(theirs)
    merge(theirs, adapter)
    return their_logits(theirs, prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_adapters_equals_merged_weights(family, tmp_path):
    theirs = tiny(family)
    source, model = opened(tmp_path / "base", theirs)
    adapters = [
        write_adapter(tmp_path / str(rank), theirs, targets, r=rank, seed=rank)
        for rank, targets in ((4, FAMILIES[family]), (8, FAMILIES[family][:1]))
    ]
    for slot, path in zip((1, 3), adapters, strict=True):
        model.set_adapter(slot, read_adapter(str(path), *read_family(source)).updates)
    asked = prompts(11, 7, 1, 9, 4)
    slots = [1, 0, 3, 3, 1]
    wanted = [
        their_logits(theirs, prompt) if not slot else merged_logits(theirs, adapters[slot == 3], prompt)
        for prompt, slot in zip(asked, slots, strict=True)
    ]
    for chunk in (None, 3):
        got = run_model(model, asked, chunk, adapters=slots)
        for mine, want in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, want, atol=2e-4, rtol=1e-4)
    assert (wanted[0] - their_logits(theirs, asked[0])).abs().max() > 0.1  # what is compared differs from the base
    model.set_adapter(3, {})
    torch.testing.assert_close(
        run_model(model, asked[2:3], adapters=[3])[0], their_logits(theirs, asked[2]), atol=2e-4, rtol=1e-4
    )


def test_matrices_that_no_adapter_updates_run_as_the_base(tmp_path, monkeypatch):
    """Not as updates of zeros: 32 adapters have as many numbers as a fifth of the model."""
    theirs = tiny("llama3")
    source, model = opened(tmp_path / "base", theirs)
    layers, added = len(model.layers), []
    original = model.stages.lora.add_lora
    monkeypatch.setattr(model.stages, "lora", SimpleNamespace(
        segments=model.stages.lora.segments, add_lora=lambda *args: (added.append(args[4]), original(*args))
    ))  # fmt: skip
    (prompt,) = prompts(5)
    counts = []
    for slot, targets in ((1, ("q_proj", "v_proj")), (2, ("k_proj",)), (3, ("q_proj", "down_proj"))):
        path = write_adapter(tmp_path / str(slot), theirs, targets, r=4, seed=slot)
        model.set_adapter(slot, read_adapter(str(path), *read_family(source)).updates)
        added.clear()
        run_model(model, [prompt], adapters=[slot])
        counts.append((model.updated, len(added)))
    assert counts == [(layers, layers), (layers, layers), (2 * layers, 2 * layers)]


@pytest.mark.parametrize("variation", VARIATIONS)
def test_ranks_and_scales_are_as_peft_has_them(variation, tmp_path):
    theirs = tiny("llama3")
    source, model = opened(tmp_path / "base", theirs)
    path = write_adapter(tmp_path / "adapter", theirs, **VARIATIONS[variation])
    model.set_adapter(2, read_adapter(str(path), *read_family(source)).updates)
    (prompt,) = prompts(12)
    (got,) = run_model(model, [prompt], adapters=[2])
    torch.testing.assert_close(got, merged_logits(theirs, path, prompt), atol=2e-4, rtol=1e-4)


def rewrite(path, change):
    name = path / "adapter_model.safetensors"
    tensors = change(load_file(name))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, name)


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
DAMAGE = {
    "there is no adapter_config.json": lambda path: (path / "adapter_config.json").unlink(),
    "no adapter_model.safetensors": lambda path: (path / "adapter_model.safetensors").unlink(),
    "there is only lora_A": lambda path: rewrite(path, lambda t: {k: v for k, v in t.items() if k != Q.format("B")}),
    "should be of rank 4": lambda path: rewrite(path, lambda t: t | {Q.format("A"): t[Q.format("A")][:3]}),
    "takes 40 inputs": lambda path: rewrite(path, lambda t: t | {Q.format("A"): t[Q.format("A")][:, :40]}),
    "has 30 outputs": lambda path: rewrite(path, lambda t: t | {Q.format("B"): t[Q.format("B")][:30]}),
    "not finite": lambda path: rewrite(path, lambda t: t | {Q.format("B"): t[Q.format("B")] / 0}),
    "no update of a linear layer": lambda path: rewrite(
        path, lambda t: t | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 97)}
    ),
    "only projections of attention": lambda path: rewrite(
        path,
        lambda t: (
            t
            | {
                f"base_model.model.lm_head.lora_{side}.weight": torch.ones(*shape)
                for side, shape in (("A", (4, 48)), ("B", (97, 4)))
            }
        ),
    ),
}
CONFIGS = {
    "DoRA": {"use_dora": True},
    "trained whole": {"modules_to_save": ["lm_head"]},
    "trained biases": {"bias": "all"},
    "experts": {"target_parameters": ["mlp.experts.gate_up_proj"]},
    "single tokens": {"trainable_token_indices": [1]},
    "peft_type is 'IA3'": {"peft_type": "IA3"},
    "lora_alpha of": {"lora_alpha": 0},
}


@pytest.mark.parametrize("reason", [*DAMAGE, *CONFIGS])
def test_what_cannot_be_run_is_refused_in_one_line(reason, tmp_path):
    theirs = tiny("llama3")
    theirs.save_pretrained(tmp_path / "base")
    path = write_adapter(tmp_path / "adapter", theirs)
    if reason in DAMAGE:
        DAMAGE[reason](path)
    else:
        config = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps(config | CONFIGS[reason]))
    with pytest.raises(ModelFileError, match=reason) as refused:
        read_adapter(str(path), *read_family(resolve(str(tmp_path / "base")).open()))
    assert "\n" not in str(refused.value)


def test_experts_are_refused(tmp_path):
    theirs = tiny("qwen2-moe")
    theirs.save_pretrained(tmp_path / "base")
    path = write_adapter(tmp_path / "adapter", theirs, ("q_proj",))
    name = "base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_{}.weight"
    rewrite(path, lambda t: t | {name.format("A"): torch.ones(4, 48), name.format("B"): torch.ones(24, 4)})
    with pytest.raises(ModelFileError, match="it updates experts"):
        read_adapter(str(path), *read_family(resolve(str(tmp_path / "base")).open()))


def test_the_compiled_decoder_is_close_to_merged_weights(tmp_path):
    """It packs weights to 8 bits, and adapters: which of both is rounded matters little."""
    theirs = tiny("block-sized")
    path = write_adapter(tmp_path / "adapter", theirs, r=5, size=0.1)
    (prompt,) = prompts(30)
    theirs.save_pretrained(tmp_path / "base")
    source = resolve(str(tmp_path / "base")).open()
    base = load_model(source, device="cpu", dtype=torch.float32, compiled=2)
    merge(theirs, path)
    theirs.save_pretrained(tmp_path / "merged")
    merged = load_model(resolve(str(tmp_path / "merged")).open(), device="cpu", dtype=torch.float32, compiled=2)
    base.reserve_adapters(2, 16)
    base.set_adapter(2, read_adapter(str(path), *read_family(source)).updates)
    (got,), (wanted,), (plain,) = (
        run_model(base, [prompt], adapters=[2]),
        run_model(merged, [prompt]),
        run_model(base, [prompt]),
    )
    exact = their_logits(theirs, prompt)
    assert (got - exact).norm() < 1.3 * (wanted - exact).norm() < 0.1 * (plain - exact).norm()
