"""Every family against transformers: the same weights, logits equal to 1e-4 however the prompt is cut up. Gated
DeltaNet's to 5e-4: transformers' own float32 is up to 2e-4 from its float64 there (AVX-512 without AMX)."""

from __future__ import annotations

import json

import pytest
import torch
from model_harness import run_model
from tiny_models import CONFIGS, prompts, their_logits, tiny
from transformers import AutoModelForCausalLM

from quire.assets import resolve
from quire.kernels.hidden_state_tap import HiddenStateTap
from quire.model import Model, load_model
from quire.model.recurrent_spec import GatedDelta

HYBRIDS = ["qwen3-next", "qwen3.5", "granite-hybrid", "nemotron-h", "lfm2"]
CPU = {"device": "cpu", "dtype": torch.float32}


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory):
    """(transformers model, the same loaded by us from its safetensors files)"""
    theirs = tiny(request.param)
    path = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(path)
    return theirs, load_model(resolve(str(path)).open(), **CPU)


@pytest.mark.parametrize("pair", CONFIGS, indirect=True)
def test_logits_match_transformers(pair):
    theirs, ours = pair
    tolerance = 5e-4 if any(isinstance(layer.mixer, GatedDelta) for layer in ours.spec.layers) else 1e-4
    first, second = prompts(41, 29)
    expected = [their_logits(theirs, first), their_logits(theirs, second)]
    assert expected[0].std() > 0.3, "the model says something"
    close(run_model(ours, [first])[0], expected[0], tolerance)
    for chunk in (None, 7, 1):
        for got, want in zip(run_model(ours, [first, second], chunk=chunk), expected, strict=True):
            close(got, want, tolerance)


@pytest.mark.parametrize("pair", HYBRIDS, indirect=True)
def test_states_go_from_chunk_to_chunk(pair):
    """Prompts of many chunks that are computed in parallel, of different lengths, beside single tokens."""
    theirs, ours = pair
    asked = prompts(420, 3, 150, 257, 64, 129)
    for chunk in (None, 190):
        for got, prompt in zip(run_model(ours, asked, chunk=chunk), asked, strict=True):
            close(got, their_logits(theirs, prompt), 5e-4)  # rounding adds up over so many tokens


@pytest.mark.parametrize("pair", ["llama3", "gpt2", "olmo2", "gemma2", "gemma4", "qwen3-next", "lfm2"], indirect=True)
@pytest.mark.parametrize("last", [False, True])
def test_a_tap_shows_what_transformers_has_behind_a_layer(pair, last):
    theirs, ours = pair
    first, second = prompts(41, 29)
    inner = range(len(ours.spec.layers) - 1)  # behind the last layer theirs has its final norm
    with torch.no_grad():
        states = [theirs(torch.tensor([p]), output_hidden_states=True).hidden_states for p in (first, second)]
    tap = HiddenStateTap(tuple(inner))
    plain, shown = (run_model(ours, [first, second], last=last, tap=t) for t in (None, tap))
    assert all(torch.equal(a, b) for a, b in zip(plain, shown, strict=True))
    assert tap.states and len(tap.states) == len(inner)
    for layer, state in zip(inner, tap.states, strict=True):
        close(state, torch.stack([s[layer + 1][0, -1] for s in states]))


def test_dynamic_rope_beyond_the_trained_context(tmp_path):
    """Frequencies are fixed for the length to be served; transformers grows them with the prompt, so they meet
    when the prompt has that length."""
    theirs = tiny("llama-dynamic")
    theirs.save_pretrained(tmp_path)
    ours = load_model(resolve(str(tmp_path)).open(), **CPU, length=200)
    (prompt,) = prompts(200)
    close(run_model(ours, [prompt], chunk=64)[0], their_logits(theirs, prompt))


@pytest.mark.parametrize("name", ["llama3", "gpt2"])
def test_sharded_files(tmp_path, name):
    theirs = tiny(name)
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    (prompt,) = prompts(20)
    ours = load_model(resolve(str(tmp_path)).open(), **CPU)
    close(run_model(ours, [prompt])[0], their_logits(theirs, prompt))


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("llama2", {"rope_theta": 10000.0}),
        ("llama3", {"rope_theta": 500.0, "rope_scaling": True}),
        ("yarn", {"rope_theta": 1000.0, "rope_scaling": True}),
    ],
)
def test_older_configs(tmp_path, name, rope):
    """rope_theta and rope_scaling (with `type`) beside each other, torch_dtype, no layer types."""
    theirs = tiny(name)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    scaling = config.pop("rope_parameters")
    del scaling["rope_theta"]
    if rope.get("rope_scaling"):
        scaling["type"] = scaling.pop("rope_type")
        rope = {**rope, "rope_scaling": scaling}
    config |= rope | {"torch_dtype": config.pop("dtype")}
    file.write_text(json.dumps(config))
    (prompt,) = prompts(30)
    close(
        run_model(load_model(resolve(str(tmp_path)).open(), **CPU), [prompt])[0],
        their_logits(theirs, prompt),
    )


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gpt2", "olmo2", "gemma2", "qwen3-next", "nemotron-h", "lfm2"])
def test_stored_in_half_precision(name, tmp_path):
    """Files in bfloat16, computed in float32."""
    tiny(name).to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    (prompt,) = prompts(24)
    ours = load_model(resolve(str(tmp_path)).open(), **CPU)
    close(run_model(ours, [prompt])[0], their_logits(theirs, prompt))


@pytest.mark.parametrize(
    "pair", ["llama3", "qwen2-mixed-windows", "qwen3", "gpt2", "olmo2", "gemma2", *HYBRIDS], indirect=True
)
def test_computed_in_bfloat16(pair, tmp_path):
    theirs, _ = pair
    theirs.save_pretrained(tmp_path)
    ours = load_model(resolve(str(tmp_path)).open(), device="cpu", dtype=torch.bfloat16)
    (prompt,) = prompts(24)
    got, want = run_model(ours, [prompt], chunk=10)[0], their_logits(theirs, prompt)
    assert ours.embed.weight.dtype == torch.bfloat16
    error = (got - want).abs().mean() / want.abs().mean()
    assert error < 0.1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pair", CONFIGS, indirect=True)
def test_on_a_gpu(pair, tmp_path):
    theirs, _ = pair
    theirs.save_pretrained(tmp_path)
    ours: Model = load_model(resolve(str(tmp_path)).open(), device="cuda", dtype=torch.float32)
    first, second = prompts(41, 29)
    for chunk in (None, 7):
        for got, prompt in zip(run_model(ours, [first, second], chunk=chunk), (first, second), strict=True):
            close(got, their_logits(theirs, prompt), 2e-3)
