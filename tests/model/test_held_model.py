"""Weights that are mapped: the same tensors and logits, nothing read, and no memory of the model's own."""

from __future__ import annotations

import json

import pytest
import torch
from model_harness import run_model
from tiny_models import CONFIGS, SIZES, filled, prompts, tiny
from transformers import LlamaConfig

from quire.assets import resolve
from quire.kernels import cpu
from quire.model import CompiledModel, load_model
from quire.model.loading import held_model, keep_quantised

CPU = {"device": "cpu", "dtype": torch.float32}


class Memory:
    """Held in this process."""

    def __init__(self, limit: int = 1 << 30):
        self.limit = limit
        self.blocks: list[torch.Tensor] = []
        self.index: bytes | None = None
        self.refused = ""

    def find(self):
        return None if self.index is None else (self.blocks, self.index)

    def create(self, size):
        self.blocks.append(torch.zeros(size, dtype=torch.uint8))
        return self.blocks[-1]

    def publish(self, index):
        self.index = index

    def refuse(self, why):
        self.refused = why

    def discard(self, why):
        self.refused, self.index, self.blocks = why, None, []


def addresses(model):
    return {tensor.untyped_storage().data_ptr() for tensor in model.weights()}


@pytest.fixture
def unread(monkeypatch):
    """From when it is called on, no weight may be read or drawn."""

    def forbid(*args, **kwargs):
        raise AssertionError("weights are mapped, not loaded")

    def begin():
        monkeypatch.setattr("quire.model.loading.load.fill_weights", forbid)
        monkeypatch.setattr("quire.model.loading.load.fill_random", forbid)
        monkeypatch.setattr(cpu.PackedMatrix, "fill", forbid)

    return begin


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_maps_what_the_first_has_loaded(name, tmp_path, unread, monkeypatch):
    monkeypatch.setattr(held_model, "BLOCK_BYTES", 20_000)  # several
    tiny(name).save_pretrained(tmp_path)
    source, memory, (prompt,) = resolve(str(tmp_path)).open(), Memory(), prompts(23)
    wanted = run_model(load_model(source, **CPU), [prompt])[0]
    first = load_model(source, **CPU, held=memory)
    unread()
    again = load_model(source, **CPU, held=memory)
    held = {block.data_ptr() for block in memory.blocks}
    assert addresses(first) == addresses(again) == held and len(held) > 2
    for model in (first, again):
        assert torch.equal(run_model(model, [prompt])[0], wanted)
    assert not memory.refused


def test_weights_of_4_bits_are_held_as_they_are_kept(tmp_path, unread, monkeypatch):
    monkeypatch.setattr(keep_quantised, "why_not", lambda device: None)  # as if the kernels could run here
    filled(
        LlamaConfig(**SIZES | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4})
    ).save_pretrained(tmp_path)
    source, memory, (prompt,) = resolve(str(tmp_path)).open(), Memory(), prompts(23)
    options = {"device": "cpu", "dtype": torch.float16, "quantize": "int4"}
    wanted = run_model(load_model(source, **options), [prompt])[0]
    load_model(source, **options, held=memory)
    unread()
    again = load_model(source, **options, held=memory)
    assert torch.equal(run_model(again, [prompt])[0], wanted)
    assert {t.dtype for t in again.weights()} >= {torch.uint8, torch.int16, torch.float16}


def test_random_weights_are_held_too(tmp_path, unread):
    (tmp_path / "config.json").write_text(json.dumps(json.loads(tiny("llama3").config.to_json_string())))
    source, memory, (prompt,) = resolve(str(tmp_path)).open(), Memory(), prompts(23)
    first = run_model(load_model(source, **CPU, random_weights=True, held=memory), [prompt])[0]
    unread()
    assert torch.equal(run_model(load_model(source, **CPU, random_weights=True, held=memory), [prompt])[0], first)


def test_the_compiled_decoder_maps_packed_matrices(default_model, monkeypatch):
    if reason := cpu.available():
        pytest.skip(reason)
    memory, (prompt,) = Memory(), prompts(23)
    wanted = run_model(load_model(default_model.open(), **CPU, compiled=1), [prompt])[0]
    first = load_model(default_model.open(), **CPU, compiled=1, held=memory)
    packed = memory.blocks[0].clone()
    monkeypatch.setattr(cpu.PackedMatrix, "fill", None)  # only vectors are read
    again = load_model(default_model.open(), **CPU, compiled=1, held=memory)
    assert isinstance(again, CompiledModel) and len(memory.blocks) == 1
    for model in (first, again):
        assert torch.equal(run_model(model, [prompt])[0], wanted)
    assert torch.equal(memory.blocks[0], packed)


@pytest.mark.parametrize("compiled", [None, 1])
def test_what_is_too_large_or_of_another_model_is_loaded(compiled, default_model, tmp_path):
    if compiled and (reason := cpu.available()):
        pytest.skip(reason)
    (prompt,) = prompts(11)
    source = default_model.open()
    if compiled is None:
        tiny("llama3").save_pretrained(tmp_path)
        source = resolve(str(tmp_path)).open()
    wanted = run_model(load_model(source, **CPU, compiled=compiled), [prompt])[0]
    small = Memory(limit=1000)
    assert torch.equal(run_model(load_model(source, **CPU, compiled=compiled, held=small), [prompt])[0], wanted)
    assert "hold_weights allows 1,000" in small.refused and not small.blocks
    other = Memory()
    other.create(4096)
    other.publish(b"[]")
    assert torch.equal(run_model(load_model(source, **CPU, compiled=compiled, held=other), [prompt])[0], wanted)
    assert "not those of this model" in other.refused


def test_a_model_with_memory_that_is_not_held_is_loaded(tmp_path, monkeypatch):
    """One that made a tensor beside its weights would find nothing in it."""
    tiny("llama3").save_pretrained(tmp_path)
    source, memory, (prompt,) = resolve(str(tmp_path)).open(), Memory(), prompts(23)
    wanted = run_model(load_model(source, **CPU, held=memory), [prompt])[0]
    beside = []
    norm = held_model.Model._norm
    monkeypatch.setattr(held_model.Model, "_norm", lambda *args: beside.append(torch.empty(3)) or norm(*args))
    assert torch.equal(run_model(load_model(source, **CPU, held=memory), [prompt])[0], wanted)
    assert "not those of this model" in memory.refused


def test_adapters_are_not_held(tmp_path):
    """They are written to, and the next model has none when it maps its weights."""
    tiny("llama3").save_pretrained(tmp_path)
    source, memory = resolve(str(tmp_path)).open(), Memory()
    model = load_model(source, **CPU)
    model.reserve_adapters(1, 4)
    held_model.hold_model(model, memory)
    assert memory.index is not None and b"lora" not in memory.index
    assert load_model(source, **CPU, held=memory) is not None and not memory.refused
