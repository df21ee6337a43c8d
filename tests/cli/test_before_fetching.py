"""What is said of models on a hub before any weight is fetched, and how many bytes it takes to know. Files of large
models are there by their headers alone, so that fetching one would fail."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from loopback_hub import Hub
from typer.testing import CliRunner

import quire.runtime.model_fit as model_fit
from quire import LLM, assets
from quire.assets.hub_headers import HeaderSource
from quire.cli.main import app
from quire.model import resident_bytes
from quire.model.quantization.fp8 import Fp8Scheme
from quire.runtime.hardware import Hardware
from quire.types.errors import ConfigError, ModelFileError, ModelNotFoundError, QuireError

GIB = 1 << 30
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0,
}  # fmt: skip
GEMMA = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42,
    "intermediate_size": 14336, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "vocab_size": 256000, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "rope_theta": 10000.0,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
ODD_HEADS = GEMMA | {"head_dim": 240}  # of a size that the compiled decoder does not run


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """21 GiB free, 200 GB of disk, memory that is read with 20 GB/s."""
    monkeypatch.setattr(model_fit, "probe", lambda device: Hardware("cpu", "CPU", 21 * GIB, 2))
    monkeypatch.setattr(model_fit, "memory_bandwidth", lambda device: 20e9)
    monkeypatch.setattr("quire.assets.hub_preview.free_disk", lambda path: 200_000_000_000)


def tensors(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim", hidden // heads)
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if "gemma" in config["model_type"]:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    else:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= {f"{at}{norm}.weight": (hidden,) for norm in norms}
        kv = config["num_key_value_heads"] * dim
        for name, shape in (
            ("self_attn.q_proj", (heads * dim, hidden)), ("self_attn.k_proj", (kv, hidden)),
            ("self_attn.v_proj", (kv, hidden)), ("self_attn.o_proj", (hidden, heads * dim)),
            ("mlp.gate_proj", (inner, hidden)), ("mlp.up_proj", (inner, hidden)), ("mlp.down_proj", (hidden, inner)),
        ):  # fmt: skip
            found[f"{at}{name}.weight"] = shape
    return found | {"model.norm.weight": (hidden,)}


def put(hub: Hub, repository: str, config: dict, stored: dict[str, tuple[str, tuple[int, ...]]] | None = None) -> int:
    """A repository of one safetensors file, its header alone; returns what the whole would have."""
    stored = stored or {name: ("BF16", shape) for name, shape in tensors(config).items()}
    at, header = 0, {}
    for name, (kind, shape) in stored.items():
        end = at + math.prod(shape) * {"BF16": 2, "F16": 2, "I32": 4}[kind]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    beginning = len(text).to_bytes(8, "little") + text
    hub.files[repository] = {"config.json": json.dumps(config).encode(), "model.safetensors": beginning}
    hub.sizes[repository, "model.safetensors"] = len(beginning) + at
    return len(beginning) + at


def put_gguf(hub: Hub, tmp_path: Path, repository: str, *files: str) -> None:
    """A repository of GGUF files of one small model, their headers alone."""
    writer = gguf.GGUFWriter(tmp_path / "head.gguf", "llama")
    writer.add_context_length(2048)
    for name, value in (
        ("embedding_length", 256), ("block_count", 1), ("feed_forward_length", 512), ("attention.head_count", 4),
        ("attention.head_count_kv", 4), ("vocab_size", 512), ("rope.dimension_count", 64),
    ):  # fmt: skip
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_array("tokenizer.ggml.tokens", [f"<{number}>" * 64 for number in range(8192)])  # more than a first read
    shapes = {"token_embd.weight": (512, 256), "output_norm.weight": (256,), "output.weight": (512, 256)}
    for name in ("attn_norm.weight", "ffn_norm.weight"):
        shapes[f"blk.0.{name}"] = (256,)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        shapes[f"blk.0.{name}.weight"] = (256, 256)
    for name, shape in (("ffn_gate", (512, 256)), ("ffn_up", (512, 256)), ("ffn_down", (256, 512))):
        shapes[f"blk.0.{name}.weight"] = shape
    total = 0
    for name, shape in shapes.items():
        if len(shape) == 1:
            size = 4 * shape[0]
            writer.add_tensor_info(name, shape, np.dtype(np.float32), size)
        else:
            size, rows = math.prod(shape) // 256 * 144, (shape[0], shape[1] // 256 * 144)
            writer.add_tensor_info(name, rows, np.dtype(np.uint8), size, gguf.GGMLQuantizationType.Q4_K)
        total += size
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    beginning = (tmp_path / "head.gguf").read_bytes()
    for file in files:
        hub.files.setdefault(repository, {})[file] = beginning
        hub.sizes[repository, file] = len(beginning) + total + 4096


def said(*words: str) -> str:
    """What a command prints, or the error that it ends with."""
    try:
        done = CliRunner().invoke(app, list(words), catch_exceptions=False, env={"COLUMNS": "400"})
        return done.stdout if "--json" in words else done.output
    except QuireError as error:
        return f"{type(error).__name__}: {error}"


def test_a_plain_checkpoint_loads_as_int8(hub: Hub) -> None:
    size = put(hub, "org/llama-8b", LLAMA)
    text = said("show", "org/llama-8b")
    assert "llama, 8,030,261,248 parameters, context 131,072" in text
    assert f"{size / 1e9:.2f} GB" in text and "200.00 GB free on the disk" in text
    assert "7.95 GiB of weights in int8, 21.00 GiB free" in text and "tok/s" in text
    figures = json.loads(said("show", "org/llama-8b", "--json"))
    assert figures["fits"] and figures["weights_form"] == "int8" and 0 < figures["context"] < 131072
    assert figures["tokens_per_second"] == pytest.approx(20e9 * 0.6 / figures["weights_bytes"], rel=0.1)
    assert hub.sent < 200_000  # of 16 GB, twice


def test_scaled_and_capped_layers_load_as_int8_too(hub: Hub) -> None:
    put(hub, "org/gemma-9b", GEMMA)
    figures = json.loads(said("show", "org/gemma-9b", "--json"))
    assert figures["fits"] and figures["weights_form"] == "int8"
    assert figures["weights_bytes"] == pytest.approx(9_241_705_984 * 1.0625, rel=0.01)


def test_the_doctor_does_not_fetch_either(hub: Hub) -> None:
    put(hub, "org/llama-8b", LLAMA)
    text = said("doctor", "org/llama-8b", "--dtype", "float32")
    assert "29.9 GiB of weights in float32, 21.0 GiB of memory free" in text
    assert "quantize int8 would (7.9" in text and "quantize int4 would (5.1" in text and "4-bit GGUF" in text
    assert "-1" not in text and hub.sent < 100_000
    assert "no sequence of 100,000 tokens" in said("doctor", "org/llama-8b", "--context", "100000")


def test_what_plain_torch_would_not_hold(hub: Hub) -> None:
    put(hub, "org/odd-9b", ODD_HEADS)
    text = said("run", "org/odd-9b", "hello")
    assert text.startswith("ConfigError: org/odd-9b: it does not fit: 34.0 GiB of weights in float32")
    assert "dtype bfloat16 would (17." in text and "quantize int8" not in text
    assert "Nothing was fetched" in text and hub.sent < 100_000


def test_too_large_in_any_form(hub: Hub) -> None:
    put(hub, "org/llama-70b", LLAMA | {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672,
                                       "num_attention_heads": 64})  # fmt: skip
    with pytest.raises(ConfigError, match=r"it does not fit: .* a smaller model would\. Nothing was fetched"):
        LLM("org/llama-70b")
    assert hub.sent < 200_000


def test_no_room_on_the_disk(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    put(hub, "org/llama-8b", LLAMA)
    monkeypatch.setattr("quire.assets.hub_preview.free_disk", lambda path: 3_000_000_000)
    assert "16.1 GB to fetch, and the disk 3.0 GB" in said("pull", "org/llama-8b")
    assert hub.sent < 100_000


def test_an_architecture_that_is_not_supported(hub: Hub) -> None:
    put(hub, "org/rwkv", LLAMA | {"architectures": ["RwkvForCausalLM"]})
    for command in (("pull", "org/rwkv"), ("run", "org/rwkv", "hello"), ("show", "org/rwkv")):
        text = said(*command)
        assert "architecture 'RwkvForCausalLM' is not supported" in text and "Nothing was fetched" in text
        assert "GGUF" not in text  # of it would not load either
    with pytest.raises(ModelFileError, match="RwkvForCausalLM"):
        LLM("org/rwkv")
    assert assets.list_models() == [] and hub.sent < 400_000


def test_quantised_in_a_way_that_is_not_read(hub: Hub) -> None:
    put(hub, "org/llama-8b-exl2", LLAMA | {"quantization_config": {"quant_method": "exl2"}})
    text = said("pull", "org/llama-8b-exl2")
    assert "quantised with 'exl2', which is not supported" in text and "a GGUF Q4_K_M" in text and "loads" in text
    assert hub.sent < 100_000


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def awq_tensors(config: dict) -> dict[str, tuple[str, tuple[int, ...]]]:
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in tensors(config).items():
        if "proj" not in name:
            stored[name] = ("F16", shape)
            continue
        rows, columns = shape
        base = name.removesuffix("weight")
        stored[base + "qweight"] = ("I32", (columns, rows // 8))
        stored[base + "qzeros"] = ("I32", (columns // 128, rows // 8))
        stored[base + "scales"] = ("F16", (columns // 128, rows))
    return stored


def test_quantised_in_a_way_that_stays_so(hub: Hub) -> None:
    size = put(hub, "org/llama-8b-awq", LLAMA | {"quantization_config": AWQ}, awq_tensors(LLAMA))
    text = said("show", "org/llama-8b-awq")
    assert f"{size / 1e9:.2f} GB" in text and "fits" in text and "GiB of weights as stored" in text
    assert hub.sent < 200_000


def test_quantised_for_what_the_compiled_decoder_does_not_run(hub: Hub) -> None:
    put(hub, "org/odd-9b-awq", ODD_HEADS | {"quantization_config": AWQ}, awq_tensors(ODD_HEADS))
    assert "it does not fit: 34.0 GiB of weights in float32" in said("run", "org/odd-9b-awq", "hello")


def test_a_gated_model(hub: Hub) -> None:
    put(hub, "org/gated", LLAMA)
    hub.gated.add("org/gated")
    text = said("pull", "org/gated")
    assert "org/gated is gated: accept its terms on the hub, then set HF_TOKEN" in text
    assert hub.sent == 0


@pytest.mark.parametrize(
    ("name", "meant"), [("Qwen/Qwen3-8Bb", "Qwen/Qwen3-8B"), ("qwen3:9b", "qwen3:8b"), ("lama3.1:8b", "llama3.1:8b")]
)
def test_misspelt_names(hub: Hub, name: str, meant: str) -> None:
    text = said("run", name, "hello")
    assert text.startswith("ModelNotFoundError") and "did you mean" in text and meant in text
    assert hub.sent == 0


def test_pickles_are_not_fetched(hub: Hub) -> None:
    hub.files["org/pickled"] = {"config.json": json.dumps(LLAMA).encode(), "pytorch_model.bin": bytes(100)}
    text = said("pull", "org/pickled")
    assert "pickle" in text and "a GGUF Q4_K_M or a plain safetensors copy of it loads" in text
    assert {name for name, _ in hub.downloads} == {"config.json"}


def test_gguf_repositories(hub: Hub, tmp_path: Path) -> None:
    put_gguf(hub, tmp_path, "org/small-GGUF", "small-Q4_K_M.gguf", "small-Q8_0.gguf", "mmproj-small-f16.gguf")
    put_gguf(hub, tmp_path, "org/odd-GGUF", "odd-Q5_0.gguf", "odd-Q8_0.gguf")
    header = len(hub.files["org/small-GGUF"]["small-Q4_K_M.gguf"])
    for name in ("org/small-GGUF:Q8_0", "org/small-GGUF:q8", "org/small-GGUF:small-Q8_0.gguf"):
        assert "small-Q8_0.gguf" in said("show", name) and hub.downloads[-1][0] == "small-Q8_0.gguf"
    before = hub.sent
    text = said("show", "org/small-GGUF")
    assert "org/small-GGUF:small-Q4_K_M.gguf" in text and "context 2,048" in text  # what others take too
    assert re.search(r"about 2[46],000 tok/s", text)  # with 4.5 bits a weight, or 5 where kernels read these faster
    assert hub.sent - before == header > (1 << 20)  # the first read was too short, and nothing was read twice
    assert "name one of them: org/odd-GGUF:Q5_0 (0.00 GB), org/odd-GGUF:Q8_0" in said("pull", "org/odd-GGUF")
    assert "has no Q2_K; name one of them" in said("pull", "org/odd-GGUF:Q2_K")


def test_the_catalogue(hub: Hub, tmp_path: Path) -> None:
    put_gguf(hub, tmp_path, "Qwen/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B-Q8_0.gguf")
    assert "Qwen3-8B-Q4_K_M.gguf" in said("show", "qwen3:8b") and "Qwen3-8B-Q8_0" in said("show", "qwen3:8b-q8")
    text = said("catalog")
    assert "qwen3:8b" in text and "5.03 GB" in text and "Qwen/Qwen3-8B-GGUF" in text
    listed = json.loads(said("catalog", "llama3", "--json"))
    assert {"llama3.1:8b", "llama3.2:3b"} <= {model["name"] for model in listed} and "qwen" not in str(listed)


def test_names_of_the_catalogue_are_kept_under_them(hub: Hub, tiny_gguf: bytes) -> None:
    hub.files["Qwen/Qwen3-8B-GGUF"] = {"Qwen3-8B-Q4_K_M.gguf": tiny_gguf}
    model = assets.pull("qwen3:8b", progress=False)
    assert model.name == "qwen3:8b" and assets.present("qwen3:8b") == model
    assert [found.name for found in assets.list_models()] == ["qwen3:8b"]
    with pytest.raises(QuireError, match="no name for a copy"):
        assets.copy("qwen3:8b", "llama3.1:8b")
    assets.remove("qwen3:8b")
    assert assets.list_models() == [] and not model.path.exists()
    with pytest.raises(ModelNotFoundError):
        assets.remove("qwen3:8b")


def test_layers_in_fp8_take_half() -> None:
    source = HeaderSource(LLAMA, {}, 0)
    plain, halved = (
        resident_bytes(source, torch.device("cpu"), torch.bfloat16, "none", scheme) for scheme in (None, Fp8Scheme())
    )
    outside = 2 * 2 * LLAMA["vocab_size"] * LLAMA["hidden_size"]  # embedding and head stay as they are
    assert (halved - outside) / (plain - outside) == pytest.approx(0.5, abs=0.01)
