"""Pages that go as their layers are written: every transfer ends, also of a step that fails in between."""

from __future__ import annotations

import pytest

from quire.runtime import layerwise_send
from quire.runtime.layerwise_send import LayerwiseSend
from quire.types.kv import KVGroup, KVLayout
from quire.types.transfer import Transfer

LAYOUT = KVLayout((KVGroup(layers=(0, 1, 2, 3), tokens_per_page=16, kv_heads=1, head_dim=8),), "float32")


def test_a_part_that_finds_no_memory_ends_its_transfer(monkeypatch):
    monkeypatch.setattr(layerwise_send, "MIN_LAYERWISE_BYTES", 0)
    ended = []

    def take(pages, start, stop):
        raise MemoryError("none is left")

    transfer = Transfer(1, "device", "peer", [(0, b"name")], [3], layerwise=True)
    send = LayerwiseSend(
        [transfer],
        LAYOUT,
        take,
        lambda job, taken, done: None,
        lambda one, moved, _: ended.append((one.id, moved)),
    )
    with pytest.raises(MemoryError):
        send.layer_written(0.0)
        send.launched()
    send.abort()
    assert ended == [(1, [False])]
