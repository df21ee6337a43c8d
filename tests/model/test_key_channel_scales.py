"""Keys scaled by channel: attention stays what it is, and 8-bit pages keep what lies beside a large channel."""

from __future__ import annotations

import pytest
import torch
from tiny_models import prompts, tiny

from quire.assets import resolve
from quire.kernels.batch_assembly import whole_sequence
from quire.kernels.kv_views import read_tokens
from quire.model import load_model
from quire.model.quantization.key_channel_scales import key_factors

FAMILIES = ["llama3", "mistral-window", "qwen2", "qwen3", "gpt2", "olmo2", "gemma2"]


def loaded(family, path):
    theirs = tiny(family)
    theirs.save_pretrained(path)
    model = load_model(resolve(str(path)).open(), device="cpu", dtype=torch.float32)
    # two channels of every key are large, as a bias makes them in some families
    for layer in (layer.mixer for layer in model.layers):
        if layer.k_norm is not None:
            layer.k_norm.weight[[1, 3]] *= 40
        elif layer.qkv.bias is not None:
            keys = layer.qkv.parts[0]
            layer.qkv.bias[[keys + 1, keys + 3]] += 40
        else:
            keys = layer.qkv.parts[0]
            layer.qkv.state["weight"][[keys + 1, keys + 3]] *= 40
    return model


def run(model, dtype):
    """Logits, and the first layer's keys as pages have them: [tokens, kv_heads, head_dim]."""
    batch, kv = whole_sequence(model.spec.kv_layout(page_size=4, dtype=dtype), 60, torch.device("cpu"))
    (prompt,) = prompts(60)
    with torch.inference_mode():
        out = model.logits(model.forward(torch.tensor(prompt), batch, kv))
    return out, read_tokens(kv, 0, batch.groups[0].kv_slots)[0][:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_factors_change_pages_not_answers(family, tmp_path):
    model = loaded(family, tmp_path)
    logits, keys = run(model, "float32")
    rough = (run(model, "int8")[1] - keys).abs()
    factors = key_factors(model)
    assert factors.shape == (len(model.spec.layers), model.spec.kv_heads, model.spec.head_dim)
    assert factors.min() == 1 and factors.max() >= 8
    assert torch.equal(factors, key_factors(model))
    model.rescale_keys(factors)
    torch.testing.assert_close(run(model, "float32")[0], logits, atol=1e-4, rtol=1e-4)
    fine = (run(model, "int8")[1] * factors[0] / factors[0].max() - keys).abs()
    small = (factors[0] == 1) & (factors[0].amax(-1, keepdim=True) >= 8)  # beside a large channel
    assert fine[:, small].mean() < 0.25 * rough[:, small].mean()
    assert fine.mean() < rough.mean()
    assert key_factors(model).max() <= 2  # nothing is left to scale
