"""Replicas of one process each a thread: the real engine loop and link over an executor that computes nothing, and that
takes only as many steps as it is let, so that a test knows how far each has come when it is killed."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from typing import Any

import numpy as np
from msgspec.structs import replace

from quire.cluster.cluster_client import ClusterClient
from quire.engine.core import EngineCore
from quire.engine.engine_process import EngineProcess
from quire.runtime.connectors.open_connector import open_connector
from quire.runtime.connectors.page_connector import PageConnector
from quire.runtime.tiers.signed_page import PageSigner
from quire.types.config import EngineOptions
from quire.types.fake_tiers import Entries, Entry
from quire.types.fakes import FakeExecutor, fake_token
from quire.types.kv import KVGroup, KVLayout
from quire.types.membership import CurveKeys, PeerLink
from quire.types.messages import AdapterInfo, EngineInfo, ToClient
from quire.types.plan import Capacity, StepPlan
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams
from quire.types.transfer import DEVICE, TierJob, Transfer, TransferDone

LAYOUT = KVLayout((KVGroup(layers=(0,), tokens_per_page=4, kv_heads=1, head_dim=1),), "float32")
VOCAB = 97
CONTEXT = 60


# Of what a fake's page holds when it travels: four entries of three numbers each.
TRAVELLING = KVLayout((KVGroup(layers=(0,), tokens_per_page=4, kv_heads=1, head_dim=4),), "float32")


class Killed(BaseException):
    pass


class FakePeers:
    """The transfers of a FakeExecutor, all of them hand-overs over a real connector."""

    def __init__(self, connector: PageConnector):
        self.connector = connector
        self._under_way: dict[int, tuple[Transfer, list[np.ndarray]]] = {}
        self._jobs = itertools.count(1)

    def start(self, plan: StepPlan, kv: Entries) -> None:
        for way in plan.transfers:
            if way.source == DEVICE:
                buffers = [_packed([kv.get((page, i)) for i in range(4)]) for page in way.pages]
            else:
                buffers = [np.zeros(TRAVELLING.page_bytes, np.uint8) for _ in way.pages]
                for place in [(page, i) for page in way.pages for i in range(4)]:
                    kv.pop(place, None)
            number = next(self._jobs)
            self._under_way[number] = way, buffers
            kind = "put" if way.source == DEVICE else "get"
            self.connector.submit(TierJob(number, kind, way.keys, buffers, way.handover))
        for drop in plan.drops:
            self.connector.submit(TierJob(0, "drop", drop.keys, None, drop.handover))

    def poll(self, kv: Entries, *, some: bool) -> list[TransferDone]:
        ended = []
        if some:
            time.sleep(0.001)  # as an executor waits for a transfer, but not for long
        for done in self.connector.poll():
            if done.id in self._under_way:
                way, buffers = self._under_way.pop(done.id)
                for page, buffer, ok in zip(way.pages, buffers, done.done, strict=True):
                    if ok and way.target == DEVICE:
                        kv.update({(page, i): entry for i, entry in enumerate(_unpacked(buffer)) if entry})
                ended.append(TransferDone(way.id, done.done, done.seconds))
        return ended


def _packed(entries: list[Entry | None]) -> np.ndarray:
    page = np.zeros(TRAVELLING.page_bytes, np.uint8)
    page.view(np.int64)[:12] = [number for entry in entries for number in (entry or (-1, -1, -1))]
    return page


def _unpacked(page: np.ndarray) -> list[Entry | None]:
    numbers = page.view(np.int64)[:12].tolist()
    return [(a, b, c) if b >= 0 else None for a, b, c in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)]


class GatedExecutor(FakeExecutor):
    """Takes a step for each release of its gate; free of it once `open` is set."""

    def __init__(self, gated: bool):
        capacity = Capacity(pages=256, slots=16, max_model_len=CONTEXT, max_batch_tokens=64, depth=1)
        super().__init__(LAYOUT, capacity, vocab=VOCAB)
        self.gate = threading.Semaphore(0) if gated else None
        self.killed = False

    def connect(self, peers: PeerLink) -> PageConnector:
        signer = PageSigner(bytes.fromhex(peers.secret), b"fake", TRAVELLING)
        connector = open_connector(peers, signer, threading.Event())
        self.tiers = FakePeers(connector)  # type: ignore[assignment]
        return connector

    def submit(self, plan: StepPlan) -> Any:
        if self.gate is not None:
            assert self.gate.acquire(timeout=60)
        if self.killed:
            raise Killed
        return super().submit(plan)


class FakeReplica:
    """`kill` ends it as `kill -9` would: in the middle of whatever it does, without a word."""

    def __init__(
        self, client: ClusterClient, *, gated: bool = False, keys: CurveKeys | None = None,
        adapters: tuple[str, ...] = (), number: int = -1, hub: str = "", heartbeat_fd: int = -1,
        **options: Any,
    ):  # fmt: skip
        """`hub`: where it reaches the client, if not at its own address. `heartbeat_fd`: to the actor that hosts it."""
        self.identity = secrets.token_hex(4)
        self.executor = GatedExecutor(gated)
        lora = {"max_loras": 4, "lora": tuple(f"{name}=/{name}" for name in adapters)}
        self.core = EngineCore(EngineOptions.of(**lora, **options), self.executor)
        self.ended = threading.Event()
        common = client.membership
        self._member = replace(
            common, identity=self.identity, keys=keys or common.keys, number=number, heartbeat_fd=heartbeat_fd
        )
        self._address = hub or client.hub.address
        self._adapters = [AdapterInfo(name, f"/{name}") for name in adapters]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def steps(self, count: int) -> None:
        assert self.executor.gate is not None
        self.executor.gate.release(count)

    def free(self) -> None:
        """No gate from now on."""
        gate, self.executor.gate = self.executor.gate, None
        if gate is not None:
            gate.release()

    def kill(self) -> None:
        self.executor.killed = True
        if self.executor.gate is not None:
            self.executor.gate.release()
        assert self.ended.wait(20)

    def _run(self) -> None:
        process = EngineProcess(self._address, self._member)
        send = process.send

        def mortal(message: ToClient) -> None:
            if self.executor.killed:
                raise Killed
            send(message)

        process.send = mortal  # type: ignore[method-assign]
        info = EngineInfo(
            "fake", CONTEXT, VOCAB, 255, 4, 64, 1, "none", "none", [], slots=16, adapters=self._adapters,
            prefix_cache=self.core.scheduler.memory.prefix_cache,
        )  # fmt: skip
        try:
            process.announce(self.core, info)
            process.serve(self.core)
        except Killed:
            process._socket.setsockopt(17, 0)  # LINGER: what is not sent yet is lost
        finally:
            if self.core.connector is not None:
                self.core.connector.close()
            process.close()
            self.ended.set()


def ask(name: str, prompt: list[int], **params: Any) -> Request:
    return Request(id=name, prompt=prompt, params=SamplingParams(**{"max_tokens": 24, "seed": 1, **params}))


def expected(request: Request, branch: int = 0) -> list[int]:
    """What an undisturbed engine answers."""
    tokens = list(request.prompt)
    assert request.params.max_tokens is not None
    for _ in range(request.params.max_tokens):
        tokens.append(fake_token(tokens, request.params.seed or 0, branch, VOCAB))
    return tokens[len(request.prompt) :]
