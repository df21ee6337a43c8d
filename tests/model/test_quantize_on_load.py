"""Plain safetensors on a CPU: quantised as they are loaded, and run by the compiled decoder."""

from __future__ import annotations

import json

import pytest
import torch
from block_sized_models import CONFIGS
from model_harness import run_model
from safetensors.torch import save_file
from tiny_models import filled, prompts, their_logits, tiny

from quire.assets import resolve
from quire.kernels.cpu import Store
from quire.model import CompiledModel, load_model, packed_weights
from quire.model.blocks.linear import Linear
from quire.model.quantization.packed import PackedScheme
from quire.runtime.hardware import Hardware
from quire.runtime.hardware import resolve as decide
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError

CPU = {"device": "cpu", "dtype": torch.float32, "compiled": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    theirs = tiny("block-sized")
    path = tmp_path_factory.mktemp("plain")
    theirs.save_pretrained(path)
    return theirs, path


@pytest.mark.parametrize(("quantize", "error"), [("auto", 0.08), ("int8", 0.08), ("int4", 0.35)])
def test_logits_are_nearly_those_of_the_plain_model(saved, quantize, error):
    theirs, path = saved
    ours = load_model(resolve(str(path)).open(), **CPU, quantize=quantize)
    assert isinstance(ours, CompiledModel)
    (prompt,) = prompts(33)
    want = their_logits(theirs, prompt)
    got = run_model(ours, [prompt], kv_dtype="float16")[0]
    assert (got - want).abs().mean() < error * want.abs().mean()
    assert any(f"quantised to {4 if quantize == 'int4' else 8} bits" in line for line in ours.describe())


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-next", "granite-moe", "deepseek-v3"])
def test_4_bits_are_for_experts_and_not_for_what_chooses_them(tmp_path, name):
    filled(CONFIGS[name]()).save_pretrained(tmp_path)
    ours = load_model(resolve(str(tmp_path)).open(), **CPU, quantize="int4")
    kinds = {}
    for path, module in ours._model.modules().items():
        if isinstance(module, Linear) and not module.tied:
            packed = isinstance(module.scheme, PackedScheme)
            kinds.setdefault(path.split(".")[-1], set()).update(
                {matrix.kind for matrix in module.scheme.matrices} if packed else {"float32"}
            )
    floats = {part for part in kinds if kinds[part] == {"float32"}}
    assert floats == kinds.keys() & {"router", "shared_gate", "ba", "kv_up"}
    assert "router" in floats
    assert all(kinds[part] == {"Q4_1"} for part in kinds.keys() - floats - {"head"})


def partly_quantised(folder):
    """gpt-oss as published: experts in MXFP4, the rest in floats."""
    theirs = filled(CONFIGS["gpt-oss"]())
    tensors = {}
    for name, tensor in theirs.state_dict().items():
        tensors[name] = tensor.contiguous()
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensors.pop(name).shape
            shape = (experts, rows, columns // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(122, 126, shape, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    told = json.loads(theirs.config.to_json_string()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(told | {"architectures": ["GptOssForCausalLM"]}))
    return resolve(str(folder)).open()


@pytest.mark.parametrize(("quantize", "bits"), [("auto", 8), ("int4", 4)])
def test_what_is_quantised_in_part_says_what_becomes_of_the_rest(tmp_path, quantize, bits):
    torch.manual_seed(0)
    source = partly_quantised(tmp_path)
    ours = load_model(source, **CPU, quantize=quantize)
    expected = f"weights stay quantised, plain ones are quantised to {bits} bits"
    assert any(expected in line for line in ours.describe())
    assert packed_weights(source, quantize)[1] == expected


def test_none_leaves_what_is_plain_to_torch_though_the_rest_is_quantised(tmp_path):
    torch.manual_seed(0)
    ours = load_model(partly_quantised(tmp_path), **CPU, quantize="none")
    assert not isinstance(ours, CompiledModel)
    assert any("not quantised, and are not to be" in line for line in ours.describe())


@pytest.mark.parametrize("quantize", ["auto", "int4"])
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-next"])
def test_estimated_bytes_are_those_of_what_is_loaded(tmp_path, monkeypatch, name, quantize):
    reserved, make = [], Store.__init__

    def noted(self, size, *given):
        reserved.append(size)
        make(self, size, *given)

    monkeypatch.setattr(Store, "__init__", noted)
    filled(CONFIGS[name]()).save_pretrained(tmp_path)
    source = resolve(str(tmp_path)).open()
    ours = load_model(source, **CPU, quantize=quantize)
    floats = sum(tensor.nbytes for module in ours._model.modules().values() for tensor in module.tensors().values())
    assert packed_weights(source, quantize)[0] == pytest.approx(sum(reserved) + floats, rel=0.01)


def test_none_leaves_them_to_torch(saved):
    theirs, path = saved
    ours = load_model(resolve(str(path)).open(), **CPU, quantize="none")
    assert not isinstance(ours, CompiledModel)
    (prompt,) = prompts(33)
    torch.testing.assert_close(run_model(ours, [prompt])[0], their_logits(theirs, prompt), atol=1e-4, rtol=1e-4)


def test_what_cannot_be_quantised_says_why(tmp_path):
    tiny("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"quantize int8 .* cannot run this: gpt2 has hidden size 48, no multiple"):
        load_model(resolve(str(tmp_path)).open(), **CPU, quantize="int8")
    load_model(resolve(str(tmp_path)).open(), **CPU)


@pytest.mark.parametrize(
    ("device", "quantize", "dtype", "match"),
    [
        ("cuda:0", "int8", "auto", "on a GPU use quantize fp8"),
        ("cpu", "fp8", "auto", "on a CPU use int8 or int4"),
        ("cpu", "int4", "bfloat16", "goes with dtype auto"),
        ("cpu", "int3", "auto", "quantize.*int3"),
        ("cuda:0", "fp8", "float16", "computes the rest in bfloat16"),
    ],
)
def test_options_that_do_not_go_together(device, quantize, dtype, match):
    with pytest.raises(ConfigError, match=match):
        decide(EngineOptions.of(quantize=quantize, dtype=dtype), Hardware(device, "test", 1 << 34, 2))


def test_fp8_on_a_gpu_is_what_the_dtype_says():
    gpu = Hardware("cuda:0", "test", 1 << 34, 2)
    by_dtype, by_quantize = (decide(EngineOptions.of(**{name: "fp8"}), gpu) for name in ("dtype", "quantize"))
    assert by_quantize.fp8 and by_quantize.kv_dtype == by_dtype.kv_dtype == "float8_e4m3fn"
