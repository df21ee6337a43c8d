"""Weights kept in 4 bits: what is stored comes out as it was, and a model runs on it."""

from __future__ import annotations

import pytest
import torch
from model_harness import run_model
from published_writer import awq, gptq, write
from tiny_models import SIZES, filled, prompts
from transformers import LlamaConfig

from quire.assets import resolve
from quire.kernels.reference.dequant import FORMATS, dequantize
from quire.kernels.reference.int4_words import unpacked
from quire.model import load_model, resident_bytes
from quire.model.loading import keep_quantised
from quire.model.loading.stored_tensor import StoredTensor
from quire.model.quantization.int4 import Int4Scheme
from quire.types.seams import TensorInfo

CPU = torch.device("cpu")
PUBLISHED = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, awq(128)),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq(4, 32)),
}


def chunk_sized():
    """All rows are whole chunks of words."""
    return filled(LlamaConfig(**SIZES | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}))


def stored(kind: str, rows: int, columns: int) -> StoredTensor:
    unit, size = FORMATS[kind][:2]
    raw = torch.randint(0, 256, (rows, columns // unit, size), dtype=torch.uint8)
    halves = 1 if kind == "Q4_0" else 2
    raw[:, :, : 2 * halves] = (torch.randn(rows, columns // unit, halves) * 0.1).half().view(torch.uint8)
    raw[0, 0, :2] = 0  # a block without a scale
    return StoredTensor(TensorInfo("w", (rows, columns), kind, raw.numel()), raw.flatten().numpy())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_stored_blocks_keep_their_numbers(kind):
    torch.manual_seed(3)
    weight, scheme = stored(kind, 7, 512), Int4Scheme()
    state = scheme.create(9, 512, CPU, torch.float16)
    scheme.put(state, 0, torch.randn(9, 512))
    scheme.load(state, 2, weight)
    scheme.finish(state)
    wanted = dequantize(weight.rows(), kind).view(7, 512)
    got = unpacked(state["weight"], state["scale"], state["zero"])[2:]
    torch.testing.assert_close(got, wanted, atol=2e-3 * wanted.abs().max().item(), rtol=2e-3)


def test_plain_numbers_are_rounded_to_the_nearest_step():
    torch.manual_seed(4)
    plain, scheme = torch.randn(16, 256), Int4Scheme()
    state = scheme.create(16, 256, CPU, torch.float16)
    scheme.put(state, 0, plain)
    scheme.finish(state)
    assert state["scale"].shape == (2, 16) and state["zero"].dtype == torch.uint8
    steps = state["scale"].float().t().repeat_interleave(128, 1)
    assert ((unpacked(*state.values()) - plain).abs() <= 0.52 * steps).all()
    bits = 8 * sum(tensor.nbytes for tensor in state.values()) / plain.numel()
    assert bits == 4 + 24 / 128


@pytest.fixture
def packs(monkeypatch):
    """As if the kernels could run here; the plain product stands in for them."""
    monkeypatch.setattr(keep_quantised, "why_not", lambda device: None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_checkpoint_stays_in_4_bits(tmp_path, packs, monkeypatch, name):
    write(chunk_sized(), tmp_path, *PUBLISHED[name])
    source = resolve(str(tmp_path)).open()
    four = load_model(source, device="cpu", dtype=torch.float16)
    assert any("matrices in 4 bits" in line for line in four.describe())
    assert resident_bytes(source, CPU, torch.float16) < 0.5 * sum(m.nbytes for m in dense_tensors(source, monkeypatch))
    (prompt,) = prompts(21)
    plain = load_model(source, device="cpu", dtype=torch.float16)
    assert not any("matrices in 4 bits" in line for line in plain.describe())
    got, wanted = (run_model(model, [prompt])[0].float() for model in (four, plain))
    assert (got - wanted).norm() < 0.01 * wanted.norm()


def dense_tensors(source, monkeypatch):
    monkeypatch.setattr(keep_quantised, "why_not", lambda device: "not here")
    model = load_model(source, device="cpu", dtype=torch.float16)
    return [tensor for module in model.modules().values() for tensor in module.tensors().values()]


def test_plain_weights_become_4_bits_if_asked(tmp_path, packs):
    theirs = chunk_sized()
    theirs.save_pretrained(tmp_path)
    four = load_model(resolve(str(tmp_path)).open(), device="cpu", dtype=torch.float16, quantize="int4")
    assert {type(m.scheme) for n, m in four.modules().items() if n.endswith((".qkv", ".o", ".up", ".down"))} == {
        Int4Scheme
    }
    (prompt,) = prompts(21)
    assert run_model(four, [prompt])[0].isfinite().all()
