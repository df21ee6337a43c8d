"""Model files with something wrong in them, complete enough to load: either they do and run, or the error says what is
wrong. 100 of each container in the quick suite, 1,000 in the slow one."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from model_harness import run_model
from test_gguf_models import convert
from tiny_models import CONFIGS, tiny

from quire.assets import resolve
from quire.model import load_model
from quire.model.families.registry import read_spec
from quire.types.errors import QuireError

FAMILIES = ("llama3", "qwen3", "gemma2", "gpt2")
COUNTS = [pytest.param(100, id="100"), pytest.param(1000, id="1000", marks=pytest.mark.slow)]
NUMBERS = (-1, 0, 1, 2, 3, 7, 47, 48, 49, 96, 97, 98, 1 << 20, 1 << 31, 1 << 40, 1 << 62, 0.0, 0.5, -1.5, 1e300)
OTHERS = (None, True, "", "48", [], [1, 2], {}, {"type": "x"}, "relu", float("inf"), "gelu", "silu", "llama")


class ConfigAlone:
    """A source that has no tensors."""

    def __init__(self, config: dict[str, Any]):
        self.metadata = lambda: config
        self.tensors = dict


@pytest.mark.parametrize("family", CONFIGS)
def test_mutated_configs(family: str) -> None:
    rng = random.Random(family)
    model = tiny(family)
    written = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    read_spec(ConfigAlone(written))
    for _ in range(100):
        config = json.loads(json.dumps(written))
        name, value = rng.choice(sorted(config)), rng.choice((*NUMBERS, *OTHERS))
        inner = config[name]
        if isinstance(inner, dict) and inner and rng.random() < 0.7:
            inner[rng.choice(sorted(inner))] = value
        elif isinstance(inner, list) and inner and rng.random() < 0.5:
            inner[rng.randrange(len(inner))] = value
        else:
            config[name] = value
        try:
            read_spec(ConfigAlone(config))
        except QuireError as error:
            assert str(error)
        except Exception as error:
            raise AssertionError(f"{name} = {value!r}: {type(error).__name__}: {error}") from error


def outcome(path: Path) -> str:
    """What becomes of a model: "ran", or what is said of it."""
    try:
        model = load_model(resolve(str(path), progress=False).open(), device="cpu", dtype=torch.float32)
        (logits,) = run_model(model, [[token % model.spec.vocab_size for token in range(5)]])
        assert logits.shape[0] == 5
        return "ran"
    except QuireError as error:
        assert str(error) and error.status in (400, 404, 500)
        return str(error)


def put_to(path: Path, count: int, mutated: Callable[[random.Random], str]) -> None:
    """Every mutation ends one way or the other; enough of each end that something is tested."""
    rng = random.Random(20)
    ends: list[str] = []
    for number in range(count):
        what = mutated(rng)
        try:
            ends.append(outcome(path))
        except Exception as error:
            raise AssertionError(f"mutation {number}, {what}: {type(error).__name__}: {error}") from error
    ran = ends.count("ran")
    assert count // 20 < ran < count * 19 // 20, ran


# ---- safetensors --------------------------------------------------------------------------------------------


class Directory:
    """A model's directory as it was written, and again with one thing changed."""

    def __init__(self, path: Path, family: str):
        self.path = path
        tiny(family).save_pretrained(path)
        self.config = json.loads((path / "config.json").read_text())
        content = (path / "model.safetensors").read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        self.header = json.loads(content[8 : 8 + length])
        self.data = content[8 + length :]

    def write(self, config: Any, header: Any, data: bytes) -> None:
        (self.path / "config.json").write_text(json.dumps(config))
        encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
        weights = self.path / "model.safetensors"
        weights.unlink(missing_ok=True)  # the last one is mapped
        weights.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)

    def mutate(self, rng: random.Random) -> str:
        config, header = json.loads(json.dumps(self.config)), json.loads(json.dumps(self.header))
        data = bytearray(self.data)
        names = [name for name in header if name != "__metadata__"]
        one, other = rng.sample(names, 2)
        kind = rng.choice(("config", "config", "config", "swap", "drop", "shape", "dtype", "bits", "bytes", "rename"))
        what: Any = one
        if kind == "config":
            what = rng.choice(sorted(config))
            value = rng.choice((*NUMBERS, *OTHERS))
            if isinstance(config[what], dict) and config[what] and rng.random() < 0.7:
                inner = rng.choice(sorted(config[what]))
                config[what][inner], what = value, f"{what}.{inner}"
            elif rng.random() < 0.15:
                del config[what]
            else:
                config[what] = value
            what = f"{what} = {value!r}"
        elif kind == "swap":
            header[one], header[other] = header[other], header[one]
        elif kind == "drop":
            del header[one]
        elif kind == "shape":
            header[one]["shape"] = rng.choice((header[one]["shape"][::-1], [*header[one]["shape"], 1], [1]))
        elif kind == "dtype":
            header[one]["dtype"] = rng.choice(("F16", "BF16", "I32", "U8", "F8_E4M3", "Q4_0"))
        elif kind == "bits":
            for place in (rng.randrange(len(data)) for _ in range(64)):
                data[place] ^= 1 << rng.randrange(8)
        elif kind == "rename":
            header[one.replace("0", "7")] = header.pop(one)
        else:
            encoded = bytearray(json.dumps(header).encode())
            encoded[rng.randrange(len(encoded))] = rng.randrange(32, 127)
            header = bytes(encoded)
        self.write(config, header, bytes(data))
        return f"{kind} {what}"


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_mutated_safetensors(family: str, count: int, tmp_path: Path) -> None:
    directory = Directory(tmp_path, family)
    assert outcome(tmp_path) == "ran"
    put_to(tmp_path, count // len(FAMILIES), directory.mutate)


# ---- GGUF ---------------------------------------------------------------------------------------------------


class File:
    """A GGUF file as it was written, and again with one thing changed: a value of its header, or a few bytes."""

    def __init__(self, path: Path, family: str):
        self.path = path
        convert(tiny(family), str(path))
        self.content = path.read_bytes()
        reader = gguf.GGUFReader(path)
        self.start = reader.data_offset
        # Where values and tensor descriptions lie: name → (offset, numpy type)
        self.places = [
            (name, int(part.ctypes.data - reader.data.ctypes.data), part.dtype)
            for name, field in reader.fields.items()
            for part in field.parts[-1:]
            if not name.startswith("GGUF.") and part.dtype.kind in "uif" and part.size == 1
        ]
        for tensor in reader.tensors:
            for part in tensor.field.parts[2:]:
                at = int(part.ctypes.data - reader.data.ctypes.data)
                self.places += [(tensor.name, at + i * part.itemsize, part.dtype) for i in range(part.size)]

    def mutate(self, rng: random.Random) -> str:
        content = bytearray(self.content)
        kind = rng.choice(("value", "value", "value", "name", "bits", "bytes", "end"))
        what: Any = ""
        if kind == "value":
            name, at, dtype = rng.choice(self.places)
            value = rng.choice(NUMBERS)
            with np.errstate(all="ignore"):
                stored = np.array([value]).astype(dtype)
            content[at : at + dtype.itemsize] = stored.tobytes()
            what = f"{name} = {stored[0]!r}"
        elif kind == "name":
            at = content.find(b"blk.") + rng.randrange(4)
            content[at] = rng.randrange(97, 122)
        elif kind == "bits":
            for place in (rng.randrange(self.start, len(content)) for _ in range(64)):
                content[place] ^= 1 << rng.randrange(8)
        elif kind == "bytes":
            place = rng.randrange(8, self.start)
            content[place] = rng.randrange(256)
            what = place
        else:
            del content[-rng.randrange(1, 200) :]
        self.path.unlink()  # the last one is mapped
        self.path.write_bytes(content)
        return f"{kind} {what}"


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("family", ["llama3", "block-sized", "qwen3", "gemma2"])
def test_mutated_gguf(family: str, count: int, tmp_path: Path) -> None:
    file = File(tmp_path / "model.gguf", family)
    assert outcome(file.path) == "ran"
    put_to(file.path, count // 4, file.mutate)
