"""Models of one server, loaded when they are asked for by name and kept by policy.

    unloaded ──asked for──► waits for room ──► loading ──► loaded ◄──leases── requests
        ▲                        (others, idle, go)           │
        └── unloading, or asleep ◄── idle for keep_alive, or another needs its room

A request holds a lease while it runs; only a model without leases is unloaded. Whoever asks for one that is being
loaded shares that load, and its failure; who asks after a pause tries again. Loads make room in the order they were
asked for: a model that has to go gets no new leases until it has gone, so that a busy one does not keep others out for
ever. No room is made for a load that nobody waits for any more. Where engines may sleep, one that goes does that rather
than end, and a load wakes it.
Refuses to know: requests, how engines are started.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Protocol

from quire.engine.client import CLOSED
from quire.engine.frontend import Frontend
from quire.engine.model_room import ModelRoom, PoolLimits, gib
from quire.engine.pooled_model import Lease, LoadedModel, ModelState, PooledModel, bound_tokenizer, restore_adapters
from quire.engine.sleeping_engines import SleepingEngines
from quire.types.config import EngineOptions
from quire.types.errors import EngineDeadError, OverloadedError, QuireError
from quire.types.messages import AdapterInfo
from quire.types.models_file import ServedModel

log = logging.getLogger(__name__)

LOAD_RETRY_S = 5.0  # after which a model that had no room may have some

OpenModel = Callable[[ServedModel, Frontend | None], Awaitable[Frontend]]


class Closable(Protocol):
    def close(self) -> None: ...


class ModelPool:
    """`open_model` starts an engine for an entry, given the frontend it had before; `size`: bytes it may take."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        open_model: OpenModel,
        limits: PoolLimits | None = None,
        size: Callable[[ServedModel], int] = lambda model: 0,
    ):
        self._models = {model.name: PooledModel(model, size(model)) for model in models}
        self._open_model = open_model
        self._limits = limits or PoolLimits()
        self._room = ModelRoom(self._models.values(), self._limits)
        self._asleep = SleepingEngines(self._limits.asleep)
        self._turn = asyncio.Lock()  # to make room
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()  # engines of models that are being unloaded
        self._closed = False
        self.single_model = False  # one model, which stays
        self.closables: list[Closable] = []  # what ends with it

    @classmethod
    def of(cls, frontend: Frontend) -> ModelPool:
        """Of one model, that is loaded and stays."""

        async def reopened(model: ServedModel, earlier: Frontend | None) -> Frontend:
            return frontend

        pool = cls([ServedModel(frontend.model_name, EngineOptions(), pinned=True)], reopened)
        pool.single_model = True
        [model] = pool._models.values()
        model.resident = LoadedModel(frontend)
        model.latest = bound_tokenizer(frontend)
        return pool

    # ---- what there is --------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return list(self._models)

    @property
    def default(self) -> Frontend:
        """Of the first model, loaded or not."""
        latest = next(iter(self._models.values())).latest
        assert latest is not None, "the pool has not been started"
        return latest

    def find(self, name: str | None) -> tuple[str, str] | None:
        """The model that a name means, and its adapter if it means one (adapter, or model:adapter)."""
        if name is None or name in self._models:
            return name or self.names[0], ""
        for model in self._models.values():
            own = {one.name for one in model.adapters}
            for adapter in (name, name.removeprefix(f"{model.name}:")):
                if adapter in own:
                    return model.name, adapter
        return None

    def latest(self, name: str) -> Frontend | None:
        """What is known of a model; None: it was never loaded."""
        return self._models[name].latest

    def spec(self, name: str) -> ServedModel:
        return self._models[name].spec

    def adapters(self, name: str) -> list[AdapterInfo]:
        return self._models[name].adapters

    def loaded(self) -> dict[str, Frontend]:
        """By name, the default first."""
        return {name: model.resident.frontend for name, model in self._models.items() if model.resident is not None}

    def sleeps(self, name: str) -> bool:
        """Whether its engine was put to sleep to make room, or because it was idle."""
        return name in self._asleep

    def states(self) -> list[ModelState]:
        first, asleep = self.names[0], self._asleep
        return [model.look(default=name == first, asleep=name in asleep) for name, model in self._models.items()]

    @property
    def busy(self) -> bool:
        """Whether anyone waits for an answer, or for an engine that starts."""
        return any(state.requests or state.state in ("loading", "restarting") for state in self.states())

    def restarts(self) -> int:
        """Times that engines were replaced."""
        return sum(model.restarts for model in self._models.values())

    def trouble(self) -> str | None:
        """Why the default model could not answer now; None if it could, or would be loaded."""
        frontend = self.loaded().get(self.names[0])
        return frontend.client.trouble() if frontend is not None else None

    # ---- leases ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the default, and those that are pinned."""
        for model in list(self._models.values()):
            if model.spec.pinned or model.name == self.names[0]:
                try:
                    (await self.acquire(model.name)).release()
                except EngineDeadError as error:
                    raise error.__cause__ or error from None  # whoever starts a server is told why

    async def acquire(self, name: str) -> Lease:
        """A lease of a model, loaded if need be. OverloadedError: there was no room for it in time."""
        if (lease := self.acquire_loaded(name)) is not None:
            return lease
        model = self._models[name]
        return self._lease(model, await self._loaded(model))

    def acquire_loaded(self, name: str) -> Lease | None:
        """A lease of a model that is loaded and may be used; None: it takes a wait."""
        if self._closed:
            raise EngineDeadError(CLOSED)
        model = self._models[name]
        if model.resident is None or model.resident.draining:
            return None
        self._hold(model, model.resident)
        return self._lease(model, model.resident)

    def _lease(self, model: PooledModel, held: LoadedModel) -> Lease:
        return Lease(model.name, held.frontend, lambda keep_alive: self._released(model, held, keep_alive))

    async def _loaded(self, model: PooledModel) -> LoadedModel:
        """The model once it is loaded, held for the caller."""
        if model.load is None:
            model.check_failure()
        waiter: asyncio.Future[LoadedModel] = asyncio.get_running_loop().create_future()
        model.waiters.append(waiter)
        if model.load is None:
            model.load = asyncio.create_task(self._load(model), name=f"load {model.name}")
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter in model.waiters:
                model.waiters.remove(waiter)
                self._notify()
            elif waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._released(model, waiter.result(), None)
            raise

    def _hold(self, model: PooledModel, resident: LoadedModel) -> None:
        resident.leases += 1
        if model.timer is not None:
            model.timer.cancel()
        self._room.used(model)

    def _released(self, model: PooledModel, resident: LoadedModel, keep_alive: float | None) -> None:
        resident.leases -= 1
        if model.resident is not resident:
            return
        if keep_alive is not None:
            model.keep_alive = keep_alive
        self._room.used(model)
        if not resident.leases:
            self._start_idle_timer(model, resident)
            self._notify()

    def _start_idle_timer(self, model: PooledModel, resident: LoadedModel) -> None:
        """Nobody holds it: from now on it may go."""
        model.idle_since = time.monotonic()
        if not model.spec.pinned and model.keep_alive < math.inf and not self._closed:
            loop, own = asyncio.get_running_loop(), Context()  # not the request's that was the last
            model.timer = loop.call_later(model.keep_alive, self._expire, model, resident, context=own)

    def _expire(self, model: PooledModel, resident: LoadedModel) -> None:
        if model.resident is resident and not resident.leases and not resident.draining:
            self._unload(model, "idle", sleep=model.keep_alive > 0)

    async def unload(self, name: str) -> bool:
        """Once it is idle, or loaded and then idle; returns at once if it is busy. One that sleeps ends. False: it is
        pinned, and stays."""
        model = self._models[name]
        if model.spec.pinned:
            return False
        if model.resident is not None or model.load is not None:
            model.keep_alive = 0.0
        if model.resident is not None and not model.resident.leases:
            await asyncio.shield(self._unload(model, "as asked"))
        elif model.resident is None and model.load is None:
            model.may_sleep = False
            await asyncio.shield(self._asleep.drop(name))
        return True

    def forget_failure(self, name: str) -> None:
        """Who asks for it next has it loaded, however short a time ago that failed."""
        self._models[name].forget_failure()

    # ---- loads and room -------------------------------------------------------------------------------------

    async def _load(self, model: PooledModel) -> None:
        """One load, for all who wait for it."""
        failure: Exception = EngineDeadError(CLOSED)
        try:
            await self._wait_for_room(model)
            if model.opening:
                await self._open(model)
        except OverloadedError as refusal:
            failure = refusal
            log.warning("%s", refusal)
        except Exception as error:
            failure = model.failed(error)
            log.error("model %s could not be loaded: %s", model.name, error)
        finally:
            model.load, model.opening = None, False
            waiters, model.waiters = [each for each in model.waiters if not each.done()], []
            for waiter in waiters:
                if model.resident is not None:
                    self._hold(model, model.resident)
                    waiter.set_result(model.resident)
                else:
                    waiter.set_exception(failure)
            if model.resident is not None and not model.resident.leases:
                self._start_idle_timer(model, model.resident)
            self._notify()

    async def _wait_for_room(self, model: PooledModel) -> None:
        """Until it may be opened (`opening`), is loaded after all, or nobody waits for it."""
        try:
            if self._turn.locked():
                log.info("model %s waits for room, behind others", model.name)
            async with asyncio.timeout(self._limits.wait), self._turn:
                if model.resident is None:
                    model.opening = await self._make_room(model)
                    if not model.opening:
                        log.info("loading model %s is given up: nobody waits for it any more", model.name)
        except TimeoutError:
            busy = ", ".join(repr(other.name) for other in self._room.others(model) if other.in_memory)
            raise OverloadedError(
                f"there is no room for model {model.name!r}: {busy} stayed in use for {self._limits.wait:g} s",
                retry_after=LOAD_RETRY_S,
            ) from None

    async def _make_room(self, model: PooledModel) -> bool:
        """Have others go until this one fits; those that are busy once they are idle. False: nobody waits for it."""
        others, told = list(self._room.others(model)), False
        try:
            while model.waiters:
                changed = self._changed
                if self._room.fits(model) and not model.unloading:
                    return True
                going = self._room.going_for(model)
                if going is None and not any(other.opening for other in others):
                    pinned = [repr(other.name) for other in others if other.in_memory]
                    raise OverloadedError(
                        f"there is no room for model {model.name!r} beside {', '.join(pinned)}, which stay loaded",
                        retry_after=LOAD_RETRY_S,
                    )
                for other in others:
                    if other.resident is not None:
                        other.resident.draining = other in (going or ())
                        if other.resident.draining and not other.resident.leases:
                            self._evict(other, model)
                busy = [other.name for other in others if other.resident is not None and other.resident.draining]
                if busy and not told:
                    log.info("model %s waits for room: %s in use", model.name, ", ".join(busy))
                    told = True
                await changed.wait()
            return False
        finally:
            for other in others:
                if other.resident is not None:
                    other.resident.draining = False

    def _evict(self, model: PooledModel, other: PooledModel) -> None:
        self._room.evicted(model)
        self._unload(model, f"room for {other.name}", sleep=model.keep_alive > 0)

    async def _open(self, model: PooledModel) -> None:
        log.info("loading model %s", model.name)
        began = time.monotonic()
        frontend = await self._asleep.take(model.name)
        if frontend is None:
            frontend = await self._start_engine(model)
            model.use(frontend)
        model.load_s = time.monotonic() - began
        model.load_s_total += model.load_s
        model.loads += 1
        model.forget_failure()
        model.resident = LoadedModel(frontend)
        model.resident.watch = asyncio.create_task(self._watch(model, model.resident), context=Context())
        log.info("model %s is loaded: %s in %.2f s", model.name, gib(model.size), model.load_s)
        if self._limits.bytes is not None and model.size > self._limits.bytes:
            log.warning("model %s alone takes more than models_memory; give it a smaller kv_memory", model.name)
        for other in self._room.idle_for(model):
            self._evict(other, model)

    async def _start_engine(self, model: PooledModel) -> Frontend:
        """Another than it had; what it takes is known now."""
        earlier = model.latest
        frontend = bound_tokenizer(await self._open_model(model.spec, earlier))
        try:
            if earlier is not None:
                await restore_adapters(frontend, earlier)
            stats = await frontend.client.stats()
            engines = max(1, sum(one.pid > 0 for one in await frontend.client.replicas()))
        except BaseException:
            await frontend.client.close()
            raise
        copies = engines * model.spec.engine.device.context_parallel  # other ranks have a part of the weights each
        size = max(copies * frontend.client.info.weights.bytes + stats.kv_bytes, stats.memory, 1)
        model.size = size * max(engines, model.spec.most_engines) // engines
        return frontend

    async def _watch(self, model: PooledModel, resident: LoadedModel) -> None:
        """An engine that is lost for good leaves its place; who asks next has another one started."""
        error = await resident.frontend.client.lost()
        if model.resident is resident:
            log.error("the engine of model %s is lost: %s", model.name, error)
            model.failures += 1
            self._unload(model, "its engine is gone")

    def _unload(self, model: PooledModel, why: str, *, sleep: bool = False) -> asyncio.Task[None]:
        """From now on it is not loaded; the task ends when its memory is free. `sleep`: it may, instead of ending."""
        resident = model.resident
        assert resident is not None
        log.info("unloading model %s: %s", model.name, why)
        model.resident, model.unloading, model.may_sleep = None, True, sleep and model.spec.replicas is None
        model.keep_alive = model.spec.keep_alive  # what was asked for lately was about this stay
        model.unloads += 1
        if model.timer is not None:
            model.timer.cancel()

        task = asyncio.create_task(self._release_engine(model, resident))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _release_engine(self, model: PooledModel, resident: LoadedModel) -> None:
        try:
            if resident.watch is not None:
                resident.watch.cancel()
            if model.may_sleep:
                waking = {other.name for other in self._models.values() if other.load is not None}
                await self._asleep.put(model.name, resident.frontend, waking)
            else:
                await resident.frontend.client.close()
                await self._asleep.drop(model.name)  # it may have slept before
        finally:
            model.unloading = False
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- the end --------------------------------------------------------------------------------------------

    async def lost(self) -> QuireError:
        """Wait until the server has nothing left to serve: its one engine is gone for good. Never, of several."""
        if self.single_model:
            return await self.default.client.lost()
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self) -> None:
        """End all engines; what is still open ends with an error first."""
        self._closed = True
        loads = [model.load for model in self._models.values() if model.load is not None]
        for load in loads:
            load.cancel()
        for model in self._models.values():
            if model.timer is not None:
                model.timer.cancel()
            if model.resident is not None and model.resident.watch is not None:
                model.resident.watch.cancel()
        engines = [frontend.client.close() for frontend in self.loaded().values()]
        beside = [asyncio.to_thread(one.close) for one in self.closables]
        await asyncio.gather(*loads, *engines, self._asleep.close(), *self._closing, *beside, return_exceptions=True)
