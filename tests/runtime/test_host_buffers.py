"""Host memory for pages on their way: what is kept, and for whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.runtime import host_buffers
from quire.runtime.host_buffers import HostBuffers
from quire.runtime.layerwise_send import SenderThread
from quire.types.transfer import TierDone, TierJob


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> HostBuffers:
    """As on a GPU, without locked memory; four rows of a kibibyte in a slab."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **how: empty(*size, **how))
    monkeypatch.setattr(host_buffers, "SLAB_BYTES", 4096)
    monkeypatch.setattr(host_buffers, "MAX_KEPT_BYTES", 2 * 4096)
    return HostBuffers(1024, pinned=True)


def test_rows_are_in_order_and_their_memory_is_used_again(buffers: HostBuffers) -> None:
    rows = buffers.take(11, 1024)
    assert len(rows) == 11 and [len(part) for part in rows.parts] == [4, 4, 3]
    for number, row in enumerate(rows):
        row[:] = number
    assert [int(row[0]) for part in rows.parts for row in part] == list(range(11))
    before = {slab.data_ptr() for slab in rows.slabs}
    buffers.give_back(rows)
    again = buffers.take(12, 1024)
    assert len(before & {slab.data_ptr() for slab in again.slabs}) >= 2, "two are kept"


def test_few_rows_take_no_more_than_they_need(buffers: HostBuffers) -> None:
    few = buffers.take(1, 1024)
    assert [slab.nbytes for slab in few.slabs] == [1024]
    buffers.give_back(few)
    assert not buffers._free


def test_what_too_much_waits_before_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU may still be writing to its buffers: nothing waits for that here."""
    monkeypatch.setattr("quire.runtime.layerwise_send.MAX_QUEUED_BYTES", 100)
    failed: list[int] = []
    sender = SenderThread(lambda job, ended: None, lambda job, ended: failed.append(job.id))
    sender._queued = 1

    def never(done: TierDone) -> None:
        raise AssertionError

    buffer: Any = torch.empty(200, dtype=torch.uint8).numpy()
    sender.put(TierJob(7, "put", [(0, b"name")], [buffer], None), None, never)
    sender.close()
    assert failed == [7]
