"""One model of a server's pool: its entry, whether it is in memory, who holds it, what its loads took.

Refuses to know: other models, who loads it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from quire.engine.frontend import Frontend
from quire.types.errors import ConfigError, EngineDeadError, InputError, ModelFileError, ModelNotFoundError
from quire.types.messages import AdapterInfo
from quire.types.models_file import ServedModel

log = logging.getLogger(__name__)

FIRST_LOAD_PAUSE_S = 1.0  # after a failed load, before another is tried
MAX_LOAD_PAUSE_S = 60.0


class ModelState(msgspec.Struct, kw_only=True):
    """A model of the server as it is now; times of day in seconds since the epoch, null where it never expires."""

    name: str
    state: str  # unloaded, asleep, loading, loaded, restarting (its engine) or unloading
    default: bool
    pinned: bool
    requests: int  # that hold it
    bytes: int  # of weights and KV pages; of one that was never loaded, about
    expires_at: float | None
    loads: int
    load_failures: int
    unloads: int
    load_s: float  # that its latest load took, waits for room left out
    load_s_total: float


@dataclass(eq=False)
class LoadedModel:
    """One stay of a model in memory."""

    frontend: Frontend
    leases: int = 0
    draining: bool = False  # another waits for its room
    watch: asyncio.Task[None] | None = field(default=None, repr=False)  # for its engine's loss


class Lease:
    """A request's hold on a loaded model, or on what is known of one. `keep_alive`: how long it is to stay after this
    request, from now on."""

    def __init__(
        self, model: str, frontend: Frontend, release: Callable[[float | None], None] = lambda keep_alive: None
    ):
        self.model = model
        self.frontend = frontend
        self.keep_alive: float | None = None
        self._held = True
        self._release = release

    def release(self) -> None:
        """Once or more often."""
        if self._held:
            self._held = False
            self._release(self.keep_alive)


class PooledModel:
    def __init__(self, spec: ServedModel, size: int):
        self.spec = spec
        self.size = size
        self.resident: LoadedModel | None = None
        self.latest: Frontend | None = None  # what is known of it goes on to be, its engine gone or not
        self.waiters: list[asyncio.Future[LoadedModel]] = []  # each is given a lease
        self.load: asyncio.Task[None] | None = None
        self.opening = self.unloading = False  # its memory is taken, though it is not loaded
        self.may_sleep = False  # whether its engine, which is being unloaded, may sleep instead of ending
        self.keep_alive = spec.keep_alive
        self.idle_since = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.loads = self.failures = self.unloads = 0
        self.load_s = self.load_s_total = 0.0
        self._earlier_restarts = 0  # of engines before the latest
        self._failure: Exception | None = None  # of its latest load
        self._pause = self._retry_at = 0.0  # until when nothing else is tried

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def adapters(self) -> list[AdapterInfo]:
        """Of its latest engine; before there was one, those it will be started with."""
        if self.latest is not None:
            return self.latest.client.adapters
        return [AdapterInfo(name, path) for name, path in self.spec.engine.adapters.named.items()]

    @property
    def in_memory(self) -> bool:
        return self.resident is not None or self.opening or self.unloading

    @property
    def restarts(self) -> int:
        """Times that its engines were replaced."""
        return self._earlier_restarts + _restarts(self.latest)

    def use(self, frontend: Frontend) -> None:
        """It has another engine."""
        self._earlier_restarts += _restarts(self.latest)
        self.latest = frontend

    def failed(self, error: Exception) -> EngineDeadError:
        """A load came to nothing: what those who wait are told, and who asks in the next seconds, twice as many each
        time. Else every request would start a process, and have another model go for it."""
        self.failures += 1
        self._failure, self._pause = error, min(max(FIRST_LOAD_PAUSE_S, 2 * self._pause), MAX_LOAD_PAUSE_S)
        self._retry_at = time.monotonic() + self._pause
        return self._told()

    def check_failure(self) -> None:
        """Raises where the latest load failed a moment ago."""
        if time.monotonic() < self._retry_at:
            raise self._told()

    def forget_failure(self) -> None:
        self._pause = self._retry_at = 0.0

    def _told(self) -> EngineDeadError:
        error = EngineDeadError(f"model {self.name!r} could not be loaded; the server's log says why")
        error.retry_after, error.__cause__ = self._retry_at - time.monotonic(), self._failure
        return error

    def _state(self, asleep: bool) -> str:
        if self.resident is not None:
            return "loaded" if getattr(self.resident.frontend.client, "alive", True) else "restarting"
        if self.load is not None or self.unloading:
            return "loading" if self.load is not None else "unloading"
        return "asleep" if asleep else "unloaded"

    def look(self, *, default: bool, asleep: bool) -> ModelState:
        """`asleep`: whether it has an engine that sleeps."""
        resident, left = self.resident, math.inf
        if resident is not None and not self.spec.pinned:
            left = self.keep_alive - (0.0 if resident.leases else time.monotonic() - self.idle_since)
        return ModelState(
            name=self.name, state=self._state(asleep), default=default, pinned=self.spec.pinned,
            requests=resident.leases if resident is not None else 0, bytes=self.size,
            expires_at=time.time() + max(0.0, left) if left < math.inf else None, loads=self.loads,
            load_failures=self.failures, unloads=self.unloads, load_s=self.load_s, load_s_total=self.load_s_total,
        )  # fmt: skip


def _restarts(frontend: Frontend | None) -> int:
    return 0 if frontend is None else getattr(frontend.client, "restarts", 0)


def bound_tokenizer(frontend: Frontend) -> Frontend:
    """No text is tokenised further than the model could take."""
    info = frontend.client.info
    frontend.text.tokenizer = frontend.text.tokenizer.up_to(max(info.max_model_len, info.stream_len))
    return frontend


async def restore_adapters(frontend: Frontend, earlier: Frontend) -> None:
    """Bring a new engine to the adapters that the one before had."""
    wanted, there = earlier.client.adapters, frontend.client.adapters
    for one in [one for one in there if one not in wanted]:
        await frontend.client.unload_adapter(one.name)
    for one in [one for one in wanted if one not in there]:
        try:
            await frontend.client.load_adapter(one.name, one.path)
        except (ConfigError, InputError, ModelFileError, ModelNotFoundError) as error:  # changed on the disk since
            log.warning("adapter %s is not loaded again: %s", one.name, error)
