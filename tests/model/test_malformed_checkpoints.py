"""Checkpoints with one thing wrong: each refused in one line that names it, by the loader and on the command line."""

from __future__ import annotations

import io
import json
import re
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from block_sized_models import CONFIGS, YARN
from published_writer import awq, fp8, gptq, packed_integers, write
from safetensors.torch import load_file, save_file
from test_gguf_models import convert
from tiny_models import filled, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.assets import resolve
from quire.cli.main import main
from quire.model import load_model, packed_weights
from quire.text.text_model import load_tokenizer
from quire.types.errors import ModelFileError, QuireError

Q = "model.layers.1.self_attn.q_proj.weight"
KV_B = "model.layers.1.self_attn.kv_b_proj.weight"
DOWN = "model.layers.1.mlp.down_proj."
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}},
}
FORMS = {
    "gptq": (GPTQ, gptq(4, 32)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq(32)),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, fp8("block")),
    "packed": (PACKED, packed_integers(32)),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound model in every container and format."""
    root = tmp_path_factory.mktemp("bases")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:97]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    for name in ("plain", "sharded", "experts", "recurrent", *FORMS):
        (root / name).mkdir()
        backend.save(str(root / name / "tokenizer.json"))
    tiny("block-sized").save_pretrained(root / "plain")
    tiny("block-sized").save_pretrained(root / "sharded", max_shard_size="60KB")
    filled(CONFIGS["deepseek-v3"]()).save_pretrained(root / "experts")
    filled(CONFIGS["lfm2"]()).save_pretrained(root / "recurrent")
    for name, (config, pack) in FORMS.items():
        write(tiny("block-sized"), root / name, config, pack)
    (root / "gguf").mkdir()
    convert(tiny("block-sized"), str(root / "gguf" / "m.gguf"), gguf.GGMLQuantizationType.Q8_0)
    return {path.name: path for path in root.iterdir()}


# ---- One thing done to a copy ------------------------------------------------------------------------------


def config(**values: Any) -> Callable[[Path], None]:
    """Values of config.json; None as a callable's result removes one."""

    def change(path: Path) -> None:
        told = json.loads((path / "config.json").read_text())
        for name, value in values.items():
            if value is MISSING:
                told.pop(name, None)
            else:
                told[name] = value
        (path / "config.json").write_text(json.dumps(told))

    return change


MISSING = object()


def quantization(**values: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        told = json.loads((path / "config.json").read_text())["quantization_config"]
        config(quantization_config=told | values)(path)

    return change


def tensor(name: str, how: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        made = how(tensors.pop(name))
        if made is not None:
            tensors[name] = made.contiguous()
        save_file(tensors, path / "model.safetensors")

    return change


def renamed(name: str, other: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        tensors[other] = tensors.pop(name)
        save_file(tensors, path / "model.safetensors")

    return change


def raw(name: str, how: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (file,) = path.glob(name)
        content = how(file.read_bytes())
        file.unlink()
        file.write_bytes(content)

    return change


def header(how: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Change what model.safetensors says of its tensors, and none of their bytes."""

    def change(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        told = json.loads(content[8 : 8 + length])
        how(told)
        encoded = json.dumps(told).encode()
        return struct.pack("<Q", len(encoded)) + encoded + content[8 + length :]

    return raw("model.safetensors", change)


def entry(name: str, **values: Any) -> Callable[[Path], None]:
    return header(lambda told: told[name].update(values))


def index(how: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "model.safetensors.index.json"
        told = json.loads(file.read_text())
        how(told)
        file.write_text(json.dumps(told))

    return change


def gone(name: str) -> Callable[[Path], None]:
    return lambda path: next(path.glob(name)).unlink()


def gguf_key(name: str, value: int) -> Callable[[Path], None]:
    """A 32-bit number in a GGUF's header."""

    def change(content: bytes) -> bytes:
        at = content.index(name.encode()) + len(name) + 4
        return content[:at] + struct.pack("<I", value) + content[at + 4 :]

    return raw("*.gguf", change)


def gguf_info(name: str, at: int, value: int, form: str = "<Q") -> Callable[[Path], None]:
    """A number of a tensor's description, so many bytes behind its name."""

    def change(content: bytes) -> bytes:
        place = content.index(name.encode()) + len(name) + at
        stored = struct.pack(form, value)
        return content[:place] + stored + content[place + len(stored) :]

    return raw("*.gguf", change)


def poisoned(path: Path) -> None:
    """A scale of a block is not a number."""
    found = {info.name: info for info in gguf.GGUFReader(path / "m.gguf").tensors}
    at = int(found["blk.1.attn_q.weight"].data_offset)
    raw("*.gguf", lambda c: c[:at] + np.float16(np.nan).tobytes() + c[at + 2 :])(path)


def split_in_two(path: Path) -> None:
    (path / "m.gguf").rename(path / "m-00001-of-00002.gguf")


def as_pickle(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def two_weight_files(path: Path) -> None:
    (path / "model.safetensors").rename(path / "a.safetensors")
    (path / "b.safetensors").write_bytes(b"x")


def nan(stored: torch.Tensor) -> torch.Tensor:
    return stored * float("nan")


CASES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "missing tensor": ("plain", tensor(Q, lambda _: None), r"incomplete, nothing fills: layers\.1\.qkv"),
    "missing embeddings": ("plain", tensor("model.embed_tokens.weight", lambda _: None), "nothing fills: embed"),
    "missing layer": ("plain", config(num_hidden_layers=9), "incomplete, nothing fills: layers"),
    "layers too few": ("plain", config(num_hidden_layers=1), "has no place for|unexpected tensors"),
    "wrong shape": ("plain", tensor(DOWN + "weight", lambda t: t.t()), r"has shape \(96, 64\).*needs \(64, 96\)"),
    "three dimensions": ("plain", tensor(Q, lambda t: t[None]), "has shape"),
    "another name": ("plain", renamed(Q, Q.replace("q_proj", "w_proj")), "unexpected tensors.*w_proj"),
    "integers for weights": ("plain", tensor(Q, lambda t: t.int()), "type I32, which is not supported"),
    "bools for weights": ("plain", tensor(Q, lambda t: t > 0), "type BOOL, which is not supported"),
    "truncated file": ("plain", raw("model.safetensors", lambda c: c[:-100]), "it is truncated"),
    "longer file": ("plain", raw("model.safetensors", lambda c: c + bytes(64)), "bytes follow the last tensor"),
    "zero-byte weights": ("plain", raw("model.safetensors", lambda _: b""), "is empty; the download was"),
    "seven bytes": ("plain", raw("model.safetensors", lambda c: c[:7]), "too few for a header"),
    "header past the end": (
        "plain",
        raw("model.safetensors", lambda c: struct.pack("<Q", 1 << 60) + c[8:]),
        "its header claims",
    ),
    "header is no JSON": ("plain", raw("model.safetensors", lambda c: c[:8] + b"x" + c[9:]), "not valid JSON"),
    "span past the end": ("plain", entry(Q, data_offsets=[1 << 40, (1 << 40) + 32768]), "leave a hole|truncated"),
    "overlapping tensors": ("plain", entry(Q, data_offsets=[0, 32768]), "overlap"),
    "shape lies": ("plain", entry(Q, shape=[64, 65]), "needs 16640 bytes, not"),
    "negative shape": ("plain", entry(Q, shape=[-64, -64]), "not lists of counts"),
    "unknown dtype": ("plain", entry(Q, dtype="F31"), "unknown dtype 'F31'"),
    "pickle only": ("plain", as_pickle, "pickle.*convert it to safetensors"),
    "two weight files": ("plain", two_weight_files, "several weight files"),
    "missing shard": ("sharded", gone("model-00002-of-*"), "needs the shard model-00002.*missing; fetch"),
    "truncated shard": ("sharded", raw("model-00002-of-*", lambda c: c[:-8]), "model-00002.*it is truncated"),
    "zero-byte shard": ("sharded", raw("model-00002-of-*", lambda _: b""), "model-00002.*is empty"),
    "index without a map": ("sharded", index(lambda told: told.pop("weight_map")), "no weight_map"),
    "index lies": (
        "sharded",
        index(lambda told: told["weight_map"].update({Q: told["weight_map"]["model.embed_tokens.weight"]})),
        f"places '{Q}' in model-",
    ),
    "index leads elsewhere": (
        "sharded",
        index(lambda told: told["weight_map"].update({Q: "../x.safetensors"})),
        "must be a .safetensors file beside",
    ),
    "zero-byte config": ("plain", raw("config.json", lambda _: b""), "config.json is not valid JSON"),
    "config is no JSON": ("plain", raw("config.json", lambda c: c[:-9]), "config.json is not valid JSON"),
    "config is a list": ("plain", raw("config.json", lambda _: b"[]"), "an object was expected"),
    "unknown architecture": ("plain", config(architectures=["MarsForCausalLM"]), "MarsForCausalLM"),
    "no heads": ("plain", config(num_attention_heads=0), "'num_attention_heads' should be an integer from 1"),
    "negative layers": ("plain", config(num_hidden_layers=-4), "'num_hidden_layers' should be"),
    "a billion layers": ("plain", config(num_hidden_layers=10**9), "'num_hidden_layers' should be"),
    "hidden of a trillion": ("plain", config(hidden_size=10**12), "'hidden_size' should be"),
    "heads as text": ("plain", config(num_attention_heads="8"), "'num_attention_heads' should be"),
    "KV heads that do not divide": ("plain", config(num_key_value_heads=3), "3|heads"),
    "no vocabulary": ("plain", config(vocab_size=MISSING), "'vocab_size'"),
    "epsilon not a number": ("plain", config(rms_norm_eps=float("nan")), "'rms_norm_eps' should be"),
    "unknown rope": ("plain", config(rope_parameters={"rope_type": "spiral"}), "spiral"),
    "unknown method": ("gptq", quantization(quant_method="martian"), "'martian', which is not supported; gptq"),
    "method of no name": ("gptq", config(quantization_config=[1]), "which is not supported"),
    "quantised in name only": ("plain", config(quantization_config=GPTQ), "but none is"),
    "NaN weights": ("plain", tensor(Q, nan), r"layers\.1.*q_proj.*not finite"),
    "NaN norm": ("plain", tensor("model.norm.weight", nan), r"model\.norm.*not finite"),
    "NaN router": ("experts", tensor("model.layers.1.mlp.gate.weight", nan), r"layers\.1\.mlp\.gate.*not finite"),
    "NaN latent": ("experts", tensor(KV_B, nan), r"kv_b_proj.*not finite"),
    "infinite latent": ("experts", tensor(KV_B, lambda t: t / 0), r"kv_b_proj.*not finite"),
    "groups that do not divide": ("experts", config(n_group=3), "3 of 8 experts cannot be chosen from 2 of 3 groups"),
    "no such groups": ("experts", config(n_group=5000), "cannot be chosen from 2 of 5000 groups"),
    "more groups than there are": ("experts", config(topk_group=9), "cannot be chosen from 9 of 4 groups"),
    "groups of one": ("experts", config(n_group=8), "cannot be chosen from 2 of 8 groups"),
    "groups too small": ("experts", config(topk_group=1), "3 of 8 experts cannot be chosen from 1 of 4 groups"),
    "no layer attends": ("recurrent", config(layer_types=["conv"] * 4), "none of its layers attends"),
    "YaRN of words": ("experts", config(rope_parameters=YARN | {"factor": "x"}), "'factor' should be a positive"),
    "YaRN without end": (
        "experts",
        config(rope_parameters=YARN | {"factor": 10**400}),
        "'factor' should be a positive",
    ),
    "YaRN weighed by words": ("experts", config(rope_parameters=YARN | {"mscale_all_dim": "x"}), "'mscale_all_dim'"),
    "no zeros": ("gptq", tensor(DOWN + "qzeros", lambda _: None), "not complete: it has no 'qzeros'"),
    "NaN scales, GPTQ": ("gptq", tensor(DOWN + "scales", nan), "down_proj.*not.*finite"),
    "NaN scales, AWQ": ("awq", tensor(DOWN + "scales", nan), "down_proj.*not.*finite"),
    "NaN scales, FP8": ("fp8", tensor(DOWN + "weight_scale_inv", nan), "down_proj.*not.*finite"),
    "NaN scales, packed": ("packed", tensor(DOWN + "weight_scale", nan), "down_proj.*not.*finite"),
    "infinite scales": ("packed", tensor(DOWN + "weight_scale", lambda t: t / 0), "down_proj.*not.*finite"),
    "bad group size": ("gptq", quantization(group_size=17), "config says groups of 17"),
    "group size of nothing": ("gptq", quantization(group_size=0), "config says groups of 0"),
    "groups too few": ("packed", tensor(DOWN + "weight_scale", lambda t: t[:, :1]), "96 columns have 1 groups"),
    "bits unknown": ("gptq", quantization(bits=5), "5 bits is not supported"),
    "bits are no number": ("gptq", quantization(bits="four"), "does not work out"),
    "floats for packed integers": ("gptq", tensor(DOWN + "qweight", lambda t: t.float()), "not int32"),
    "unknown packing": (
        "packed",
        config(quantization_config=PACKED | {"format": "zip", "config_groups": {"g": {"weights": {"num_bits": 4}}}}),
        "format zip is not supported",
    ),
    "blocks that do not fit": ("fp8", quantization(weight_block_size=[7, 7]), "do not fit"),
    "GGUF: zero bytes": ("gguf", raw("*.gguf", lambda _: b""), "is empty"),
    "GGUF: another magic": ("gguf", raw("*.gguf", lambda c: b"GGML" + c[4:]), "not a GGUF file"),
    "GGUF: truncated": ("gguf", raw("*.gguf", lambda c: c[:-40]), "truncated"),
    "GGUF: tensors that are not there": (
        "gguf",
        raw("*.gguf", lambda c: c[:8] + struct.pack("<Q", 1 << 60) + c[16:]),
        "claims .* tensors",
    ),
    "GGUF: unknown type": ("gguf", gguf_info("blk.1.attn_q.weight", 20, 99, "<I"), "type number 99"),
    "GGUF: offset past the end": ("gguf", gguf_info("blk.1.attn_q.weight", 24, 1 << 40), "truncated"),
    "GGUF: no heads": ("gguf", gguf_key("llama.attention.head_count", 0), "'num_attention_heads' should be"),
    "GGUF: layers without end": ("gguf", gguf_key("llama.block_count", 1 << 30), "'num_hidden_layers' should be"),
    "GGUF: another tensor": ("gguf", raw("*.gguf", lambda c: c.replace(b"blk.1.attn_q", b"blk.1.attn_z")), "attn_z"),
    "GGUF: NaN scale": ("gguf", poisoned, "blk.1.attn_q.weight.*not finite"),
    "GGUF: half of a split model": ("gguf", split_in_two, "1 of the 2 parts of m; missing: m-00002"),
}


@pytest.fixture
def malformed(request: pytest.FixtureRequest, bases: dict[str, Path], tmp_path: Path) -> tuple[Path, str]:
    base, change, match = CASES[request.param]
    path = tmp_path / "model"
    shutil.copytree(bases[base], path)
    change(path)
    return path, match


def test_there_are_forty() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize("base", ["plain", "sharded", "experts", "recurrent", *FORMS, "gguf"])
@pytest.mark.parametrize("compiled", [None, 1], ids=["torch", "compiled"])
def test_the_bases_are_sound(bases: dict[str, Path], base: str, compiled: int | None) -> None:
    load_model(resolve(str(bases[base])).open(), device="cpu", dtype=torch.float32, compiled=compiled)


@pytest.mark.parametrize("malformed", CASES, indirect=True)
@pytest.mark.parametrize("compiled", [None, 1], ids=["torch", "compiled"])
def test_the_loader_refuses_in_one_line(malformed: tuple[Path, str], compiled: int | None) -> None:
    path, match = malformed
    with pytest.raises(ModelFileError, match=match) as caught:
        load_model(resolve(str(path)).open(), device="cpu", dtype=torch.float32, compiled=compiled)
    one_line(str(caught.value))


@pytest.mark.parametrize("malformed", ["missing tensor", "another name", "layers too few"], indirect=True)
def test_so_does_whoever_asks_what_it_would_take(malformed: tuple[Path, str]) -> None:
    path, match = malformed
    source = resolve(str(path)).open()
    with pytest.raises(ModelFileError, match=match):
        packed_weights(source)
    with pytest.raises(ModelFileError, match=match):
        load_model(source, device="cpu", dtype=torch.float32, compiled=1, quantize="none")


@pytest.mark.parametrize("malformed", CASES, indirect=True)
def test_the_command_line_prints_one_line(
    malformed: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, match = malformed
    words = ["run", str(path), "Hello", "--max-tokens", "1", "--threads", "1"]
    if next(path.glob("*.gguf"), None):  # which have no tokenizer, and that would be missed first
        words = ["bench", "latency", "--model", str(path), "--in", "4", "--out", "1", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["quire", *words])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 1 and "Traceback" not in said.err + said.out
    (line,) = [line for line in said.err.splitlines() if line.startswith("error:")]
    assert re.search(match, line)
    one_line(line)


@pytest.mark.parametrize("how", ["missing", "broken", "empty"])
def test_a_tokenizer_is_missed_in_one_line(bases: dict[str, Path], tmp_path: Path, how: str) -> None:
    path = tmp_path / "model"
    shutil.copytree(bases["plain"], path)
    file = path / "tokenizer.json"
    if how == "missing":
        file.unlink()
    else:
        file.write_text("" if how == "empty" else '{"model": 7}')
    with pytest.raises(QuireError, match="tokenizer") as caught:
        load_tokenizer(resolve(str(path)))
    one_line(str(caught.value))


def one_line(message: str) -> None:
    assert "\n" not in message and 20 < len(message) < 700, message
