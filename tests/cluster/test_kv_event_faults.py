"""KV events to a subscriber behind a network that fails: what waits for it is bounded, and it knows what it missed."""

from __future__ import annotations

import asyncio
import struct

import pytest
import zmq
import zmq.asyncio
from fault_proxy import FaultProxy
from test_failover import until

from quire.engine import kv_event_publisher
from quire.engine.kv_event_publisher import KVEventPublisher

PAGE = struct.pack("1024q", *range(100_000, 101_024))  # tokens of a page, about 5 kB in an event
PAGES = 12000


@pytest.mark.parametrize("fault", ["cut off", "reads nothing"])
async def test_what_waits_for_a_subscriber_is_bounded_and_what_it_missed_is_known(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(kv_event_publisher, "QUEUED_BATCHES", 16)
    monkeypatch.setattr(kv_event_publisher, "KEPT_BYTES", 1 << 20)
    publisher = KVEventPublisher("tcp://127.0.0.1:*", replay=f"ipc://{tmp_path}/replay")
    context = zmq.asyncio.Context()
    try:
        async with FaultProxy(publisher.endpoint) as proxy:
            subscriber = context.socket(zmq.SUB)
            subscriber.setsockopt(zmq.RCVHWM, 16)
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            subscriber.connect(proxy.address)
            while not await subscriber.poll(20):  # until the subscription has arrived
                publisher.cleared()
            if fault == "cut off":
                proxy.to_client.block()
            for number in range(PAGES):
                publisher.published(b"%016d" % number, b"", PAGE)
            await until(lambda: not publisher._changes)
            proxy.heal()
            received, numbers = 0, []
            while received < 1 or await subscriber.poll(500):
                _, number, payload = await asyncio.wait_for(subscriber.recv_multipart(), 20)
                received += len(payload)
                numbers.append(int.from_bytes(number, "big"))
            assert received < PAGES * 5000 / 2, "most was dropped: the buffers on the way hold the rest"
            missed = set(range(numbers[0], publisher._next)) - set(numbers)
            assert missed, "the numbers tell"
            assert sum(len(payload) for _, payload in publisher._kept) <= 1 << 20
            kept = {number for number, _ in publisher._kept}
            replays = context.socket(zmq.DEALER)
            replays.connect(f"ipc://{tmp_path}/replay")
            await replays.send_multipart([b"", (0).to_bytes(8, "big")])
            again = set()
            while (answer := await asyncio.wait_for(replays.recv_multipart(), 20))[2]:
                again.add(int.from_bytes(answer[1], "big"))
                assert len(answer[2]) < 1 << 17, "batches are bounded"
            assert again == kept
    finally:
        context.destroy(linger=0)
        publisher.close()
