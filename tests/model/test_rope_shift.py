"""Cached keys moved to other positions against transformers, which computes them there."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny

from quire.assets import resolve
from quire.kernels.kv_views import KVViews, allocate_kv, read_tokens, write_tokens
from quire.model import load_model
from quire.runtime import rope_shift as turning
from quire.runtime.rope_shift import begin_rope_shifts
from quire.types.errors import ConfigError
from quire.types.plan import RopeShift, StepPlan


def rope_shift(rope_shifts, views, inverse_frequencies, copies=()):
    """As the runner does it: page copies happen between the two halves."""
    end = begin_rope_shifts(StepPlan(step=1, rope_shifts=rope_shifts, copies=list(copies)), views, inverse_frequencies)
    for source, target in copies:
        views.pool[target] = views.pool[source]
    end()


def their_entry(model, token: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [layers, kv_heads, dim] of a token on its own (what else it sees cannot matter) at a position."""
    with torch.inference_mode():
        cache = model(torch.tensor([[token]]), position_ids=torch.tensor([[position]]), use_cache=True).past_key_values
    return torch.stack([layer.keys[0, :, 0] for layer in cache.layers]), torch.stack(
        [layer.values[0, :, 0] for layer in cache.layers]
    )


def views_for(ours, dtype=torch.float32) -> KVViews:
    layout = ours.spec.kv_layout(page_size=4, dtype=str(dtype).removeprefix("torch."))
    return KVViews(allocate_kv(layout, 8, "cpu"), layout)


@pytest.mark.parametrize("name", ["llama2", "llama3", "llama-linear", "yarn-mscale", "one-kv-head", "qwen3", "olmo2"])
@pytest.mark.parametrize("small", [False, True])
def test_a_turned_key_is_the_key_of_its_new_position(tmp_path, monkeypatch, name, small):
    theirs = tiny(name)
    theirs.save_pretrained(tmp_path)
    ours = load_model(resolve(str(tmp_path)).open(), device="cpu", dtype=torch.float32)
    views = views_for(ours)
    if small:
        monkeypatch.setattr(turning, "SLICE_ELEMENTS", 1)  # token by token
    before = [(token, 40 + token) for token in range(6)]  # (token, position)
    for slot, (token, position) in enumerate(before, start=4):
        k, v = their_entry(theirs, token, position)
        write_tokens(views, 0, torch.tensor([slot]), k[None], v[None])
    # Backwards to fresh slots, forwards and not at all among each other: a ring, so nobody may write too early.
    moves = [([4, 5], [20, 21], -33), ([6, 7], [7, 6], 17), ([8, 9], [9, 8], 0)]
    rope_shifts = [RopeShift(0, *move) for move in moves]
    rope_shift(rope_shifts, views, ours.inverse_frequencies)
    for t in rope_shifts:
        for source, target in zip(t.sources, t.targets, strict=True):
            token, position = before[source - 4]
            k, v = read_tokens(views, 0, torch.tensor([target]))
            expected = their_entry(theirs, token, position + t.by)
            torch.testing.assert_close(k[0], expected[0], atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(v[0], expected[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_pages_of_fewer_bits(tmp_path, dtype):
    theirs = tiny("llama2")
    theirs.save_pretrained(tmp_path)
    ours = load_model(resolve(str(tmp_path)).open(), device="cpu", dtype=torch.float32)
    views = views_for(ours, dtype)
    k, v = their_entry(theirs, 3, 21)
    write_tokens(views, 0, torch.tensor([5]), k[None], v[None])
    rope_shift([RopeShift(0, [5], [9], -11)], views, ours.inverse_frequencies)
    got_k, got_v = read_tokens(views, 0, torch.tensor([9]))
    error = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float8_e4m3fn: 0.2}[dtype]
    wanted, _ = their_entry(theirs, 3, 10)
    torch.testing.assert_close(got_k[0], wanted, atol=error, rtol=error)
    assert torch.equal(got_v[0], v.to(dtype).float())


def test_learned_positions_are_refused():
    with pytest.raises(ConfigError, match="learned"):
        rope_shift([RopeShift(0, [1], [2], 3)], None, None)
