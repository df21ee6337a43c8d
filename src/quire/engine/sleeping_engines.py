"""Engines that a pool has put to sleep, by the names of their models, within a budget of host memory.

    loaded ──put──► asleep ──take──► loaded
                       └──► ended: another needs its memory, it is lost, or it does not wake

An engine on a GPU locks host memory when it first sleeps, and keeps it for the next time; awake, it goes on to count.
Refuses to know: which models are to sleep, what is moved where.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import cast

from quire.engine.client import AsyncClient, RestartPolicy
from quire.engine.frontend import Frontend
from quire.engine.model_room import gib
from quire.types.errors import QuireError

log = logging.getLogger(__name__)


@dataclass(eq=False)
class SleepingEngine:
    frontend: Frontend
    bytes: int  # of weights, which wait in host memory
    policy: RestartPolicy  # while it is awake
    asleep: bool = True
    watch: asyncio.Task[None] | None = field(default=None, repr=False)  # for its loss

    @property
    def client(self) -> AsyncClient:
        return cast(AsyncClient, self.frontend.client)


class SleepingEngines:
    """`budget`: bytes of host memory; 0: none sleeps."""

    def __init__(self, budget: int):
        self._budget = budget
        self._engines: dict[str, SleepingEngine] = {}  # the least recently used first

    def __contains__(self, name: str) -> bool:
        return name in self._engines and self._engines[name].asleep

    async def put(self, name: str, frontend: Frontend, waking: Collection[str] = ()) -> None:
        """Have an engine sleep; where it cannot, it ends. `waking`: those that are wanted, and do not end for it."""
        client = cast(AsyncClient, frontend.client)
        self._engines.pop(name, None)  # that it has slept before
        size = client.info.weights.bytes
        going = self._going_for(size, waking)
        if not client.alive or going is None:
            if client.alive and self._budget:
                log.info("the engine of model %s ends: its %s do not fit into models_asleep", name, gib(size))
            await client.close()
            return
        if going:
            log.info("engines asleep that end, to make room in models_asleep for %s: %s", name, ", ".join(going))
        engine = self._engines[name] = SleepingEngine(frontend, size, client.policy)
        client.policy = replace(client.policy, max_restarts=0)  # another would be awake, on a device that is lent
        try:
            await asyncio.gather(*map(self.drop, going))
            await client.power(asleep=True)
        except QuireError as error:
            if self._engines.get(name) is engine:  # else it was told to end
                log.warning("the engine of model %s ends, because it does not sleep: %s", name, error)
            await self._end(name, engine)
        except BaseException:
            await self._end(name, engine)
            raise
        else:
            engine.watch = asyncio.create_task(self._watch(name, engine), context=Context())

    def _going_for(self, size: int, waking: Collection[str]) -> list[str] | None:
        """Those that are to end for one of this size, the least recently used; None: all that may are too few."""
        free = self._budget - size - sum(one.bytes for one in self._engines.values())
        going = []
        for name in [name for name in self._engines if name in self and name not in waking]:
            if free < 0:
                free += self._engines[name].bytes
                going.append(name)
        return going if self._budget and free >= 0 else None

    async def take(self, name: str) -> Frontend | None:
        """Wake an engine; None: there is none, or it did not wake and has ended."""
        if name not in self:
            return None
        engine = self._engines[name]
        engine.asleep = False
        if engine.watch is not None:
            engine.watch.cancel()
        try:
            await engine.client.power(asleep=False)
        except QuireError as error:
            log.warning("the engine of model %s ends, because it does not wake: %s", name, error)
            await self._end(name, engine)
            return None
        except BaseException:
            await self._end(name, engine)
            raise
        engine.client.policy = engine.policy
        if engine.client.info.device == "cpu":  # where weights stayed what they were
            self._engines.pop(name, None)
        return engine.frontend

    async def drop(self, name: str) -> None:
        """Have an engine end that sleeps, or has slept."""
        if (engine := self._engines.get(name)) is not None:
            await self._end(name, engine)

    async def close(self) -> None:
        self._budget = 0  # who would sleep from now on ends
        await asyncio.gather(*map(self.drop, list(self._engines)))

    async def _watch(self, name: str, engine: SleepingEngine) -> None:
        error = await engine.client.lost()
        log.error("the engine of model %s is lost in its sleep: %s", name, error)
        engine.watch = None
        await self._end(name, engine)

    async def _end(self, name: str, engine: SleepingEngine) -> None:
        if self._engines.get(name) is engine:
            del self._engines[name]
        if engine.watch is not None:
            engine.watch.cancel()
        await engine.client.close()
