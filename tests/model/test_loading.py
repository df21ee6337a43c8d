"""Loading: what is wrong with a file is said before anything is read; what is loaded is what was stored."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from model_harness import run_model
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, prompts, their_logits, tiny

from quire.assets import resolve
from quire.model import load_model, parameter_count, read_spec, weight_bytes
from quire.model.loading import stored_tensor as stored_module
from quire.model.loading.stored_tensor import StoredTensor
from quire.types.errors import ConfigError, ModelFileError
from quire.types.seams import TensorInfo

CPU = {"device": "cpu", "dtype": torch.float32}


class FakeSource:
    """A weight source in memory; counts what is read."""

    def __init__(self, config: dict, tensors: dict[str, torch.Tensor]):
        self._config = config
        self._tensors = tensors
        self.reads: list[str] = []

    def metadata(self):
        return self._config

    def tensors(self):
        return {
            name: TensorInfo(name, tuple(t.shape), {torch.float32: "F32", torch.int64: "I64"}[t.dtype], t.nbytes)
            for name, t in self._tensors.items()
        }

    def read(self, name):
        self.reads.append(name)
        return self._tensors[name].contiguous().view(-1).view(torch.uint8).numpy()


def source_of(name: str) -> FakeSource:
    model = tiny(name)
    tensors = {
        k: v for k, v in model.state_dict().items() if k != "lm_head.weight" or not model.config.tie_word_embeddings
    }
    return FakeSource(json.loads(model.config.to_json_string()), tensors)


def refused(source: FakeSource, match: str) -> None:
    with pytest.raises(ModelFileError, match=match):
        load_model(source, **CPU)
    assert not source.reads, "refused before reading"


def test_progress_and_order():
    source, seen = source_of("llama2"), []
    load_model(source, **CPU, progress=lambda done, total: seen.append((done, total)))
    total = sum(info.nbytes for info in source.tensors().values())
    assert seen[-1] == (total, total) and len(seen) == len(source.tensors())
    assert source.reads == list(source.tensors()), "each tensor once, in the file's order"


def test_missing_tensor():
    source = source_of("qwen2")
    del source._tensors["model.layers.2.self_attn.k_proj.bias"]
    refused(source, r"incomplete.*layers\.2\.qkv\.bias \(part 1\)")


def test_unexpected_tensor():
    source = source_of("llama2")
    source._tensors["model.layers.0.self_attn.q_proj.lora_A.weight"] = torch.zeros(1, 1)
    refused(source, "unexpected tensors: model.layers.0.self_attn.q_proj.lora_A.weight")


def test_tensor_the_config_has_no_place_for():
    source = source_of("llama2")
    source._tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    refused(source, r"q_proj\.bias.*no place")
    source = source_of("llama2")
    source._tensors["model.layers.9.input_layernorm.weight"] = torch.zeros(48)
    refused(source, r"layers\.9.*no place")


def test_wrong_shape():
    source = source_of("llama2")
    source._tensors["model.embed_tokens.weight"] = torch.zeros(98, 48)
    refused(source, r"embed_tokens.*\(98, 48\).*\(97, 48\)")
    source = source_of("llama2")
    source._tensors["model.norm.weight"] = torch.tensor(1.0)
    refused(source, r"model\.norm.*shape \(\).*\(48,\)")
    source = source_of("gpt2")
    source._tensors["transformer.h.0.attn.c_attn.weight"] = torch.zeros(48, 100)
    refused(source, r"c_attn.*shape \(100, 48\)")


def test_the_same_tensor_twice():
    source = source_of("llama2")
    source._tensors["embed_tokens.weight"] = torch.zeros(97, 48)
    refused(source, "twice")


def test_unsupported_type():
    source = source_of("llama2")
    source._tensors["model.norm.weight"] = torch.zeros(48, dtype=torch.int64)
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight.*I64.*known: F32"):
        load_model(source, **CPU)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*did you mean .*ForCausalLM.*docs/models.md lists"),
        ({"architectures": None, "model_type": None}, "None.*is not supported"),
        ({"hidden_size": None}, "'hidden_size' should be an integer from 1 to 1048576, got None"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"num_key_value_heads": 4}, "6 attention heads cannot share 4"),
        ({"hidden_act": "mish"}, "mish.*known: silu"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "spiral.*known: default, linear"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'factor', got None"),
        ({"rope_parameters": {"rope_type": "linear", "factor": float("nan")}}, "'factor', got nan"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 1.0, "partial_rotary_factor": 2.0}}, "rotate 16"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one set of values"),
        ({"rope_parameters": "yarn"}, "should be an object"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}}, "does not work out"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "fast"}}, "does not work out"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq, but none is"),
        ({"quantization_config": "fp8"}, "fp8"),
    ],
)
def test_configs_we_cannot_run(change, match):
    source = source_of("llama2")
    source._config |= change
    refused(source, match)


def test_layer_types_must_fit():
    source = source_of("qwen2-layer-types")
    source._config["layer_types"] = ["full_attention"] * 3
    refused(source, "layer_types should be 4")
    source._config["layer_types"] = [["full_attention"]] * 4
    refused(source, "layer_types should be 4")


def test_tied_models_may_carry_the_head_too():
    source = source_of("llama-biased-tied")
    source._tensors["lm_head.weight"] = torch.full((97, 48), torch.nan)
    model = load_model(source, **CPU)
    assert model.head.state["weight"] is model.embed.weight
    assert not run_model(model, prompts(5))[0].isnan().any()


def test_names_without_prefix_and_stored_masks():
    """As files of the bare model, and very old files, have them."""
    source = source_of("gpt2")
    source._tensors = {name.removeprefix("transformer."): t for name, t in source._tensors.items()}
    source._tensors["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)
    source._tensors["h.0.attn.masked_bias"] = torch.tensor([-1e4])
    (prompt,) = prompts(12)
    got = run_model(load_model(source, **CPU), [prompt])[0]
    torch.testing.assert_close(got, their_logits(tiny("gpt2"), prompt), atol=1e-4, rtol=1e-4)


def test_learned_positions_cannot_be_stretched():
    with pytest.raises(ConfigError, match="at most 128"):
        load_model(source_of("gpt2"), **CPU, length=129)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gpt2"])
def test_random_weights_need_a_config_only(name):
    config = source_of(name)._config

    def draw(seed):
        return load_model(FakeSource(config, {}), **CPU, random_weights=True, seed=seed)

    (prompt,) = prompts(9)
    first, again, other = (run_model(draw(seed), [prompt])[0] for seed in (1, 1, 2))
    assert first.isfinite().all() and first.std() > 0
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes(name):
    """Parameters as transformers counts them, corrections of routers and scalars of layers; bytes follow, of some in
    float32."""
    theirs = tiny(name)
    spec = read_spec(FakeSource(json.loads(theirs.config.to_json_string()), {}))
    corrections = sum(b.numel() for n, b in theirs.named_buffers() if n.endswith(("correction_bias", "expert_bias")))
    scalars = sum(b.numel() for n, b in theirs.named_buffers() if n.endswith("layer_scalar"))
    in_float32 = (".A_log", ".dt_bias", ".D", ".per_expert_scale")
    wide = sum(p.numel() for n, p in theirs.named_parameters() if n.endswith(in_float32))
    count = theirs.num_parameters() + corrections + scalars
    assert parameter_count(spec) == count
    assert weight_bytes(spec, torch.bfloat16) == 2 * count + 2 * (corrections + wide)


def test_windows_reach_the_kv_layout():
    spec = read_spec(source_of("qwen2-mixed-windows"))
    layout = spec.kv_layout(page_size=4, dtype="float32")
    assert [(g.layers, g.window) for g in layout.groups] == [((0, 1, 2), None), ((3,), 7)]


def test_large_tensors_are_unpacked_in_slices(monkeypatch):
    monkeypatch.setattr(stored_module, "SLICE", 100)
    values = torch.randn(40, 32)
    for transposed in (False, True):
        info = TensorInfo("x", (40, 32), "F32", values.nbytes)
        out = torch.empty(32, 40) if transposed else torch.empty(40, 32)
        StoredTensor(info, values.view(-1).view(torch.uint8).numpy(), transposed=transposed).copy_into(out)
        assert torch.equal(out, values.t() if transposed else values)


def test_bytes_must_fit_the_shape():
    with pytest.raises(ModelFileError, match="5 bytes do not hold"):
        StoredTensor(TensorInfo("x", (2,), "F32", 8), np.zeros(5, dtype=np.uint8))


def test_loading_leaves_the_bits_alone(tmp_path):
    theirs = tiny("llama2")
    theirs.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    model = load_model(resolve(str(tmp_path)).open(), **CPU)
    q, k, v = model.layers[1].mixer.qkv.state["weight"].split([48, 48, 48])
    for ours, name in ((q, "q"), (k, "k"), (v, "v")):
        assert torch.equal(ours, weights[f"model.layers.1.self_attn.{name}_proj.weight"])
    save_file(weights, tmp_path / "model.safetensors")  # nothing keeps the file from being replaced
