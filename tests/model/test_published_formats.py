"""Checkpoints in published formats: logits of what their numbers mean, by transformers; packed by their own libraries
where these are installed."""

from __future__ import annotations

import json

import pytest
import torch
from model_harness import run_model
from published_writer import awq, cut_gptq, fp8, gptq, packed_integers, write
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, prompts, their_logits, tiny
from transformers import AutoModelForCausalLM

from quire.assets import resolve
from quire.model import load_model
from quire.types.errors import ModelFileError

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
INTEGERS = {"num_bits": 4, "type": "int", "strategy": "group"}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [40, 40]}


def of_weights(name: str, weights: dict) -> dict:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights, "format": name}}}


FORMATS = {
    "gptq": (GPTQ, gptq(4, 32)),
    "gptq-act-order": (GPTQ | {"desc_act": True}, gptq(4, 32, act_order=True)),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(4, 32, second=True)),
    "gptq-8": (GPTQ | {"bits": 8}, gptq(8, 32)),
    "gptq-3": (GPTQ | {"bits": 3}, gptq(3, 32)),
    "gptq-2": (GPTQ | {"bits": 2}, gptq(2, 32)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq(32)),
    "fp8-block": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, fp8("block")),
    "fp8-tensor": ({"quant_method": "fp8"}, fp8("tensor")),
    "fp8-channel": ({"quant_method": "fp8"}, fp8("channel")),
    "gptq-cut-groups": (GPTQ | {"group_size": 64}, cut_gptq(64)),
    "fp8-cut-blocks": ({"quant_method": "fp8", "weight_block_size": [40, 40]}, fp8("block", block=40)),
    "compressed-cut-blocks": (of_weights("float-quantized", BLOCKS), fp8("block", block=40, scale_name="weight_scale")),
    "compressed-groups": (of_weights("pack-quantized", INTEGERS | {"group_size": 32}), packed_integers(32)),
    "compressed-cut-groups": (of_weights("pack-quantized", INTEGERS | {"group_size": 64}), packed_integers(64)),
}


def compressed(name: str, **weights):
    library = pytest.importorskip("compressed_tensors", reason="the library that writes this format")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=name)
    compressor = BaseCompressor.get_value_from_registry(name)

    def pack(weight):
        runs = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
        extra = {}
        if name == "nvfp4-pack-quantized":
            extra["weight_global_scale"] = (448 * 6 / weight.abs().max()).reshape(1)
        scale, zero = calculate_qparams(
            runs.amin(-1), runs.amax(-1), args, global_scale=extra.get("weight_global_scale")
        )
        state = {"weight": weight, "weight_scale": scale.float(), "weight_zero_point": zero, **extra}
        stored = compressor.compress(state, scheme)
        if name == "nvfp4-pack-quantized":  # the library's own result has 16 bits
            numbers = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, dtype=torch.float32)
            wide = (stored["weight_scale"].float() / stored["weight_global_scale"]).repeat_interleave(16, 1)
            back = numbers * wide
        else:
            back = compressor.decompress(stored, scheme)["weight"].float()
        return {k: v for k, v in stored.items() if torch.is_tensor(v)}, back

    assert library.__version__
    group = {"targets": ["Linear"], "weights": {"num_bits": args.num_bits, "type": str(args.type)}, "format": name}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}}, pack


COMPRESSED = {
    "w4a16": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}),
    "w4a16-shifted": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
    "w8a16": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
    "w8a8": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
    ),
}


def check(tmp_path, config, pack, tolerance=1e-4):
    theirs = tiny("block-sized")
    write(theirs, tmp_path, config, pack)
    ours = load_model(resolve(str(tmp_path)).open(), device="cpu", dtype=torch.float32)
    (prompt,) = prompts(33)
    want = their_logits(theirs, prompt)
    torch.testing.assert_close(run_model(ours, [prompt])[0], want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_numbers_meant(tmp_path, name):
    check(tmp_path, *FORMATS[name])


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_as_their_library_packs_them(tmp_path, name):
    form, weights = COMPRESSED[name]
    check(tmp_path, *compressed(form, **weights))


@pytest.mark.parametrize("kind", ["nf4", "fp4", "nf4-nested"])
def test_bitsandbytes_as_its_library_packs_them(tmp_path, kind):
    functional = pytest.importorskip("bitsandbytes.functional", reason="the library that writes this format")

    def pack(weight):
        nested = kind == "nf4-nested"
        packed, state = functional.quantize_4bit(weight, quant_type=kind[:3], blocksize=64, compress_statistics=nested)
        parts = {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
        state.shape = torch.Size((weight.numel() // 64, 64))  # 0.50 misreads on x86 blocks over a row's end
        return {"weight": packed, **parts}, functional.dequantize_4bit(packed, state).view_as(weight)

    check(tmp_path, {"quant_method": "bitsandbytes", "load_in_4bit": True}, pack)


def test_mxfp4_experts_as_transformers_reads_them(tmp_path):
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    config = CONFIGS["gpt-oss"]()
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 32, 32
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tensors = {}
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            if not name.endswith(("gate_up_proj", "down_proj")):
                tensors[name] = tensor.normal_(0, 0.15).contiguous()
                continue
            experts, columns, rows = tensor.shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 126, (experts, rows, columns // 32), dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensor.copy_(convert(blocks, scales, dtype=torch.float32))
    save_file(tensors, tmp_path / "model.safetensors")
    told = json.loads(config.to_json_string()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    ours = load_model(resolve(str(tmp_path)).open(), device="cpu", dtype=torch.float32)
    (prompt,) = prompts(33)
    want = their_logits(theirs, prompt)
    torch.testing.assert_close(run_model(ours, [prompt])[0], want, atol=1e-4, rtol=1e-4)
    compiled = load_model(resolve(str(tmp_path)).open(), device="cpu", dtype=torch.float32, compiled=1)
    feed = compiled._model.modules()["layers.0.experts_up"]
    assert {matrix.kind for matrix in feed.scheme.matrices} == {"MXFP4"}
    up = theirs.model.layers[0].mlp.experts.gate_up_proj[1].t()  # gate and up rows in turn
    for matrix, expected in zip(feed.scheme.matrices[2:4], (up[::2], up[1::2]), strict=True):
        torch.testing.assert_close(matrix.dense(), expected, rtol=0, atol=0)
    error = (run_model(compiled, [prompt], kv_dtype="float16")[0] - want).abs().mean()
    assert error < 0.05 * want.abs().mean()


def test_4_bit_integers_stay_blocks_on_a_cpu(tmp_path):
    """The compiled decoder takes them as they are."""
    write(tiny("block-sized"), tmp_path, *FORMATS["gptq"])
    model = load_model(resolve(str(tmp_path)).open(), device="cpu", dtype=torch.float32, compiled=1)
    assert any("compiled" in line and "stay quantised" in line for line in model.describe())


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quant_method": "martian"}, "'martian', which is not supported; gptq, awq"),
        (GPTQ | {"bits": 5}, "5 bits is not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv', is not supported"),
        ("nonsense", "'nonsense', which is not supported"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, config, match):
    write(tiny("block-sized"), tmp_path, config, FORMATS["gptq"][1])
    with pytest.raises(ModelFileError, match=match):
        load_model(resolve(str(tmp_path)).open(), device="cpu", dtype=torch.float32)


ONE = "model.layers.1.mlp.down_proj."
ACT_ORDER = FORMATS["gptq-act-order"]
AWQ = FORMATS["awq"]
FP8 = FORMATS["fp8-block"]


@pytest.mark.parametrize(
    ("form", "part", "change", "match"),
    [
        (FORMATS["gptq"], "qzeros", lambda _: None, "is not complete: it has no 'qzeros'"),
        (FORMATS["gptq"], "qzeros", lambda stored: stored[:1], "scales and zeros are"),
        (
            FORMATS["gptq"],
            "scales",
            lambda stored: stored[:1],
            "96 columns have 1 groups of scales.* says groups of 32",
        ),
        (FORMATS["gptq"], "scales", lambda stored: stored[:0], "96 columns have 0 groups of scales"),
        (FORMATS["gptq"], "scales", lambda stored: stored * float("nan"), "not all of its numbers are finite"),
        (FORMATS["gptq"], "qweight", lambda stored: stored.float(), "packed integers are torch.float32, not int32"),
        (ACT_ORDER, "g_idx", lambda _: None, "is not complete: it has no 'g_idx'"),
        (ACT_ORDER, "g_idx", lambda stored: stored * 0 - 1, "not every one of 96 columns has one of 3 groups"),
        (AWQ, "scales", lambda stored: stored.flatten(), "has parts that do not fit"),
        (AWQ, "qzeros", lambda stored: torch.cat((stored, stored)), "scales and zeros are"),
        (FP8, "weight_scale_inv", lambda stored: torch.cat((stored, stored)), r"scales \(8, 6\) do not fit \(64, 96\)"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, form, part, change, match):
    refused(tmp_path, *form, {part: change}, match)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (GPTQ | {"bits": None}, "quantization_config of gptq does not work out"),
        (GPTQ | {"group_size": 16}, "the config says groups of 16"),
        ({"quant_method": ["gptq"]}, "which is not supported"),
        ({"quant_method": "fp8", "weight_block_size": ["a", "b"]}, "two whole numbers, and the config says"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "does not work out"),
    ],
)
def test_a_config_that_does_not_work_out_is_refused(tmp_path, config, match):
    refused(tmp_path, config, FORMATS["gptq"][1], {}, match)


def refused(path, config, pack, changes, match):
    """The model with parts of one matrix changed."""
    write(tiny("block-sized"), path, config, pack)
    tensors = load_file(path / "model.safetensors")
    for part, change in changes.items():
        changed = change(tensors.pop(ONE + part))
        if changed is not None:
            tensors[ONE + part] = changed.contiguous()
    (path / "model.safetensors").unlink()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelFileError, match=match):
        load_model(resolve(str(path)).open(), device="cpu", dtype=torch.float32)
