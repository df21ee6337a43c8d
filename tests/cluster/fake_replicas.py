"""Replicas of one process each a thread: the real engine loop and link over an executor that computes nothing, and that
takes only as many steps as it is let, so that a test knows how far each has come when it is killed."""

from __future__ import annotations

import secrets
import threading
from typing import Any

from msgspec.structs import replace

from quire.cluster.cluster_client import ClusterClient
from quire.engine.core import EngineCore
from quire.engine.engine_process import EngineProcess
from quire.types.config import EngineOptions
from quire.types.fakes import FakeExecutor, fake_token
from quire.types.kv import KVGroup, KVLayout
from quire.types.membership import CurveKeys
from quire.types.messages import AdapterInfo, EngineInfo, ToClient
from quire.types.plan import Capacity, StepPlan
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

LAYOUT = KVLayout((KVGroup(layers=(0,), tokens_per_page=4, kv_heads=1, head_dim=1),), "float32")
VOCAB = 97
CONTEXT = 60


class Killed(BaseException):
    pass


class GatedExecutor(FakeExecutor):
    """Takes a step for each release of its gate; free of it once `open` is set."""

    def __init__(self, gated: bool):
        capacity = Capacity(pages=256, slots=16, max_model_len=CONTEXT, max_batch_tokens=64, depth=1)
        super().__init__(LAYOUT, capacity, vocab=VOCAB)
        self.gate = threading.Semaphore(0) if gated else None
        self.killed = False

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
        adapters: tuple[str, ...] = (), number: int = -1,
        **options: Any,
    ):  # fmt: skip
        self.identity = secrets.token_hex(4)
        self.executor = GatedExecutor(gated)
        lora = {"max_loras": 4, "lora": tuple(f"{name}=/{name}" for name in adapters)}
        self.core = EngineCore(EngineOptions.of(**lora, **options), self.executor)
        self.ended = threading.Event()
        common = client.membership
        self._member = replace(common, identity=self.identity, keys=keys or common.keys, number=number)
        self._address = client.hub.address
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
