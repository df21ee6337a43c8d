"""KV cache events as vLLM's subscribers read them: by vLLM's own struct definitions, over ZMQ."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import zmq

from quire.cluster.open_cluster import replica_options
from quire.engine.build import publish_kv_events
from quire.engine.core import EngineCore
from quire.engine.kv_event_publisher import KVEventPublisher
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError
from quire.types.fakes import FakeExecutor
from quire.types.kv import KVGroup, KVLayout
from quire.types.plan import Capacity
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams
from quire.types.serving import ServeOptions

PAGE = 4


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):  # as in vllm.distributed.kv_events
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


@pytest.fixture
def endpoints(tmp_path):
    return {"endpoint": f"ipc://{tmp_path}/events", "replay": f"ipc://{tmp_path}/replay"}


@pytest.fixture
def context():
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


class Replays:
    """A client of the replay endpoint."""

    def __init__(self, context, endpoint):
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, 30_000)
        self._socket.connect(endpoint)

    def ask(self, first: int) -> dict[int, list[Any]]:
        self._socket.send_multipart([b"", first.to_bytes(8, "big")])
        found = {}
        while True:
            _, number, payload = self._socket.recv_multipart()
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                return found
            found[int.from_bytes(number, "big")] = msgspec.msgpack.decode(payload, type=KVEventBatch).events

    def until(self, count: int) -> list[Any]:
        """All events, once there are so many."""
        for _ in range(10_000):
            if len(events := [event for batch in self.ask(0).values() for event in batch]) >= count:
                return events
        raise AssertionError(f"{len(events)} events, {count} expected")


def engine(endpoints, **options) -> EngineCore:
    """A small pool: what is cached makes room."""
    layout = KVLayout((KVGroup((0,), PAGE, 1, 1),), "float32")
    capacity = Capacity(pages=9, slots=2, max_model_len=32, max_batch_tokens=64, depth=1)
    said = {"kv_events": endpoints["endpoint"], "kv_events_replay": endpoints["replay"]} | options
    made = EngineOptions.of(page_size=PAGE, **said)
    core = EngineCore(made, FakeExecutor(layout, capacity))
    publish_kv_events(core, made.cache, "cpu")
    return core


def ask(core: EngineCore, prompt: list[int], tokens: int = 1) -> None:
    core.submit(Request(id=str(prompt), prompt=prompt, params=SamplingParams(temperature=0, max_tokens=tokens)))
    while core.busy:
        core.step()


def test_pages_are_told_of_in_chains_and_again_when_asked_for(endpoints, context):
    core, replays = engine(endpoints), Replays(context, endpoints["replay"])
    prompt = list(range(20, 31))
    ask(core, prompt)
    first, second = replays.until(2)
    assert (first.token_ids, second.token_ids) == (prompt[:4], prompt[4:8])
    assert first.parent_block_hash is None and second.parent_block_hash == first.block_hashes[0]
    assert {(e.block_size, e.medium, e.lora_id) for e in (first, second)} == {(PAGE, "CPU", None)}
    ask(core, [*prompt[:8], 50, 51, 52, 53])  # only what is new
    (third,) = replays.until(3)[2:]
    assert (third.parent_block_hash, third.token_ids) == (second.block_hashes[0], [50, 51, 52, 53])
    numbers = list(replays.ask(0))
    assert numbers == list(range(len(numbers))) and list(replays.ask(numbers[-1])) == numbers[-1:]
    core.close()


def test_evicted_and_dropped_pages_are_told_of(endpoints, context):
    core, replays = engine(endpoints), Replays(context, endpoints["replay"])
    ask(core, list(range(20, 41)))  # five of eight pages
    ask(core, list(range(60, 81)))
    stored = {event.block_hashes[0] for event in replays.until(10) if isinstance(event, BlockStored)}
    events = replays.until(12)
    gone = [event for event in events if isinstance(event, BlockRemoved)]
    assert gone and {event.block_hashes[0] for event in gone} <= stored and gone[0].medium == "CPU"
    held = {int.from_bytes(name[-8:], "big") for name, *_ in core.scheduler.memory.index.entries(0)}
    assert stored - {event.block_hashes[0] for event in gone} == held
    core.reset()
    assert isinstance(replays.until(len(events) + 1)[-1], AllBlocksCleared)
    core.close()


def test_subscribers_get_batches_with_topic_and_number(endpoints, context):
    core, live = engine(endpoints, kv_events_topic="kv@pod@model"), context.socket(zmq.SUB)
    live.setsockopt_string(zmq.SUBSCRIBE, "kv@pod")
    live.connect(endpoints["endpoint"])
    prompt = 20
    while not live.poll(50):  # until the subscription has arrived
        ask(core, list(range(prompt, prompt + 5)))
        prompt += 5
    topic, number, payload = live.recv_multipart()
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    assert topic == b"kv@pod@model" and len(number) == 8 and batch.events and batch.ts > 1.7e9
    again = Replays(context, endpoints["replay"]).ask(int.from_bytes(number, "big"))
    assert again[int.from_bytes(number, "big")] == batch.events
    core.close()


def test_a_request_that_is_none_is_dropped(endpoints, context):
    publisher, broken = KVEventPublisher(**endpoints), context.socket(zmq.DEALER)
    broken.connect(endpoints["replay"])
    broken.send_multipart([b"", b"what?"])
    broken.send(b"alone")
    assert Replays(context, endpoints["replay"]).ask(0) == {}
    with pytest.raises(ConfigError, match="KV events cannot be published at"):
        KVEventPublisher("tcp://256.0.0.1:5557")
    publisher.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kv_events_replay": "tcp://127.0.0.1:5558"}, "kv_events_replay has no effect without kv_events"),
        ({"kv_events": "tcp://127.0.0.1:5557", "prefix_cache": False}, "they tell of shared prefixes"),
        ({"kv_events": "udp://127.0.0.1:5557"}, "kv_events must be one of tcp://ADDRESS"),
        ({"kv_events_config": "{}"}, "it is called kv_events, kv_events_replay and kv_events_topic here"),
    ],
)
def test_options_without_effect_are_refused(options, why):
    with pytest.raises(ConfigError, match=why):
        EngineOptions.of(**options)


def test_replicas_of_one_machine_cannot_share_an_endpoint():
    with pytest.raises(ConfigError, match="kv_events is one engine's endpoint"):
        replica_options(EngineOptions.of(kv_events="tcp://127.0.0.1:5557"), ServeOptions(replicas=2))
