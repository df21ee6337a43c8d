"""Engines that sleep where a pool would end them: who does, for how long, and what becomes of them."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import httpx
import pytest
import thinking_model
from fake_frontend import FakeFrontend
from msgspec.structs import replace
from test_model_pool import Client, Opener, settled, states

from quire.engine.client import AsyncClient, RestartPolicy
from quire.engine.model_pool import Lease, ModelPool, PoolLimits
from quire.engine.open_pool import open_model_pool
from quire.engine.sleeping_engines import SleepingEngines
from quire.serve.http.server import background_server
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError, EngineDeadError, QuireError
from quire.types.messages import WeightsInfo
from quire.types.models_file import ServedModel
from quire.types.replica_options import ReplicaOptions
from quire.types.sampling_params import SamplingParams
from quire.types.serving import ServeOptions

POLICY = RestartPolicy(heartbeat=7.0, max_restarts=3)


class PoweredClient(Client):
    """`unwilling`: what it says when it is to sleep or to wake; `gate` holds that up."""

    def __init__(self, weights: int, device: str) -> None:
        super().__init__(weights)
        self.info = replace(self.info, weights=WeightsInfo(bytes=weights), device=device)
        self.policy, self.restarts, self.asleep = POLICY, 0, False
        self.unwilling: QuireError | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def lost(self) -> QuireError:
        return await asyncio.shield(self.gone)  # several may watch

    async def power(self, *, asleep: bool, level: int = 1) -> None:
        assert level == 1 and asleep != self.asleep and not self.closed.is_set()
        waits = [asyncio.create_task(each.wait()) for each in (self.gate, self.ended)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        if self.closed.is_set():
            raise EngineDeadError("it was closed")
        if self.unwilling is not None:
            raise self.unwilling
        self.asleep = asleep

    async def close(self) -> None:
        await super().close()
        self.ended.set()


class Engines(Opener):
    """Fakes that sleep; `clients`: all that were started."""

    def __init__(self, device: str = "cuda:0", **weights: int) -> None:
        super().__init__(**weights)
        self.device = device
        self.clients: list[PoweredClient] = []

    async def __call__(self, model: ServedModel, earlier: object) -> FakeFrontend:
        frontend = await super().__call__(model, earlier)
        client = PoweredClient(self.sizes.get(model.name, 1), self.device)
        self.loaded[model.name] = frontend.client = client
        self.clients.append(client)
        return frontend

    def of(self, name: str) -> PoweredClient:
        client = self.loaded[name]
        assert isinstance(client, PoweredClient)
        return client


def pool_of(engines: Engines, names: str, asleep: int, **changes: object) -> ModelPool:
    """One is loaded at a time, and `asleep` bytes may wait."""
    models = [ServedModel(name, EngineOptions(), **changes) for name in names]  # type: ignore[arg-type]
    return ModelPool(models, engines, PoolLimits(models=1, asleep=asleep))  # type: ignore[arg-type]


async def use(pool: ModelPool, *names: str) -> None:
    for name in names:
        lease = await pool.acquire(name)
        client = lease.frontend.client
        assert isinstance(client, PoweredClient) and not client.asleep and not client.closed.is_set()
        lease.release()


async def test_a_model_that_makes_room_sleeps_and_is_woken_when_asked_for() -> None:
    engines = Engines()
    pool = pool_of(engines, "ab", asleep=10)
    await use(pool, "a", "b")
    assert states(pool) == {"a": "asleep", "b": "loaded"} and engines.of("a").asleep
    assert list(pool.loaded()) == ["b"] and not pool.busy
    await use(pool, "a", "b", "a")
    assert engines.opened == {"a": 1, "b": 1} and states(pool) == {"a": "loaded", "b": "asleep"}
    assert {one.name: (one.loads, one.unloads) for one in pool.states()} == {"a": (3, 2), "b": (2, 2)}
    await pool.close()
    assert all(client.closed.is_set() for client in engines.clients)


async def test_without_memory_to_sleep_in_engines_end() -> None:
    engines = Engines()
    pool = pool_of(engines, "ab", asleep=0)
    await use(pool, "a", "b", "a")
    assert engines.opened == {"a": 2, "b": 1} and states(pool) == {"a": "loaded", "b": "unloaded"}
    await pool.close()


async def test_no_room_is_free_before_the_engine_sleeps() -> None:
    engines = Engines()
    pool = pool_of(engines, "ab", asleep=10)
    await use(pool, "a")
    engines.of("a").gate.clear()
    asked = asyncio.create_task(pool.acquire("b"))
    await settled()
    assert states(pool) == {"a": "unloading", "b": "loading"} and engines.opened["b"] == 0
    engines.of("a").gate.set()
    (await asked).release()
    assert states(pool) == {"a": "asleep", "b": "loaded"}
    await pool.close()


async def test_those_not_used_for_long_end_where_memory_is_short() -> None:
    engines = Engines("cpu", a=4, b=3, c=3, d=11)
    pool = pool_of(engines, "abcd", asleep=10)
    await use(pool, "a", "b", "c", "d")
    assert states(pool) == {"a": "asleep", "b": "asleep", "c": "asleep", "d": "loaded"}  # 10 of 10
    await use(pool, "a", "d")  # d alone takes more, so that it ended, and none for it
    assert states(pool) == {"a": "asleep", "b": "asleep", "c": "asleep", "d": "loaded"} and engines.opened["d"] == 2
    engines.sizes["d"] = 6
    await use(pool, "a", "d", "a")  # b was used least recently, c would do no harm, but does not fit either
    assert states(pool) == {"a": "loaded", "b": "unloaded", "c": "unloaded", "d": "asleep"}
    assert engines.of("b").closed.is_set() and engines.of("c").closed.is_set()
    await pool.close()


async def test_one_that_is_wanted_does_not_end_for_the_one_that_goes() -> None:
    """Else each swap between two of which one may sleep would find nothing asleep."""
    engines = Engines("cpu", a=6, b=6)
    pool = pool_of(engines, "ab", asleep=10)
    await use(pool, "a", "b", "a", "b", "a")
    assert engines.opened == {"a": 1, "b": 2}
    await pool.close()


async def test_memory_that_an_engine_keeps_locked_while_awake_counts() -> None:
    engines = Engines(a=6, b=6, c=4)
    pool = pool_of(engines, "abc", asleep=10)
    await use(pool, "a", "b", "a")
    assert states(pool) == {"a": "loaded", "b": "unloaded", "c": "unloaded"}  # it has 6 still
    await use(pool, "c", "a")
    assert states(pool) == {"a": "loaded", "b": "unloaded", "c": "asleep"}
    await pool.unload("a")
    await use(pool, "b", "c")
    assert states(pool) == {"a": "unloaded", "b": "asleep", "c": "loaded"}  # where a's went
    await pool.close()


@pytest.mark.parametrize("waking", [False, True])
async def test_an_engine_that_cannot_sleep_or_wake_ends_and_another_is_started(waking: bool) -> None:
    engines = Engines()
    pool = pool_of(engines, "ab", asleep=10)
    await use(pool, "a")
    first = engines.of("a")
    if waking:
        await use(pool, "b")
    first.unwilling = ConfigError("the device has no memory left")
    await use(pool, "a" if waking else "b", "a")
    assert first.closed.is_set() and engines.opened["a"] == 2 and states(pool)["a"] == "loaded"
    await pool.close()


async def test_an_engine_that_dies_in_its_sleep_is_not_started_again_before_it_is_asked_for() -> None:
    engines = Engines()
    pool = pool_of(engines, "ab", asleep=10)
    await use(pool, "a")
    first = engines.of("a")
    first.restarts = 2
    await use(pool, "b")
    assert first.policy == RestartPolicy(heartbeat=7.0, max_restarts=0)
    first.gone.set_result(EngineDeadError("it was killed"))
    await settled(lambda: states(pool)["a"] == "unloaded")
    assert states(pool) == {"a": "unloaded", "b": "loaded"} and first.closed.is_set() and pool.restarts() == 2
    await use(pool, "a")
    assert engines.opened["a"] == 2
    await pool.close()


async def test_awake_again_an_engine_is_restarted_and_watched_as_before() -> None:
    engines = Engines()
    pool = pool_of(engines, "ab", asleep=10)
    await use(pool, "a", "b", "a")
    assert engines.of("a").policy == POLICY
    engines.of("a").gone.set_result(EngineDeadError("it died too often"))
    await settled(lambda: states(pool)["a"] == "unloaded")
    assert states(pool) == {"a": "unloaded", "b": "asleep"}
    await use(pool, "b", "a", "b")
    assert engines.opened == {"a": 2, "b": 1}
    await pool.close()


async def test_restarts_are_counted_once_wherever_the_engine_is() -> None:
    engines = Engines()
    pool = pool_of(engines, "ab", asleep=10)
    await use(pool, "a")
    engines.of("a").restarts = 2
    for name in "babab":
        await use(pool, name)
        assert pool.restarts() == 2
    await use(pool, "a")
    engines.of("a").restarts = 3
    engines.of("a").gate.clear()
    asked = asyncio.create_task(pool.acquire("b"))
    await settled()
    assert states(pool)["a"] == "unloading" and pool.restarts() == 3
    engines.of("a").gate.set()
    (await asked).release()
    await pool.unload("a")
    assert pool.restarts() == 3
    await use(pool, "a")
    assert engines.opened["a"] == 2 and pool.restarts() == 3
    await pool.close()


async def test_a_model_asked_to_go_ends_asleep_or_awake_or_between() -> None:
    engines = Engines()
    pool = pool_of(engines, "ab", asleep=10)
    await use(pool, "a", "b")
    assert await pool.unload("a") and engines.of("a").closed.is_set()
    assert await pool.unload("b") and engines.of("b").closed.is_set()
    assert states(pool) == {"a": "unloaded", "b": "unloaded"}
    await use(pool, "a")
    engines.of("a").gate.clear()
    asked = asyncio.create_task(pool.acquire("b"))
    await settled()
    assert await pool.unload("a") and engines.of("a").closed.is_set()
    (await asked).release()
    assert states(pool) == {"a": "unloaded", "b": "loaded"}
    await pool.close()


async def test_an_idle_model_sleeps_unless_it_is_kept_for_no_time() -> None:
    engines = Engines()
    pool = pool_of(engines, "ab", asleep=10, keep_alive=0.001)
    await use(pool, "a")
    async with asyncio.timeout(10):
        while states(pool)["a"] != "asleep":
            await asyncio.sleep(0.001)
    assert pool.states()[0].expires_at is None
    lease = await pool.acquire("a")
    lease.keep_alive = 0.0
    lease.release()
    await settled(lambda: states(pool)["a"] == "unloaded")
    assert engines.of("a").closed.is_set() and engines.opened["a"] == 1
    await pool.close()


async def test_models_with_replicas_end() -> None:
    engines = Engines()
    models = [ServedModel("a", EngineOptions(), replicas=ReplicaOptions(replicas=2)), ServedModel("b", EngineOptions())]
    pool = ModelPool(models, engines, PoolLimits(models=1, asleep=10))  # type: ignore[arg-type]
    await use(pool, "a", "b", "a")
    assert engines.opened == {"a": 2, "b": 1} and states(pool) == {"a": "loaded", "b": "asleep"}
    await pool.close()


@pytest.mark.parametrize("waking", [False, True])
async def test_a_pool_that_closes_ends_those_between_sleep_and_waking(waking: bool) -> None:
    engines = Engines()
    pool = pool_of(engines, "abc", asleep=10)
    await use(pool, "a", *("b" * waking))
    engines.of("a").gate.clear()
    asked = asyncio.create_task(pool.acquire("a" if waking else "b"))
    await settled()
    async with asyncio.timeout(10):
        await pool.close()
    with pytest.raises(EngineDeadError):
        await asked
    assert all(client.closed.is_set() for client in engines.clients)


async def test_nobody_falls_asleep_once_all_have_ended() -> None:
    engines, sleeping = Engines(), SleepingEngines(10)
    await sleeping.close()
    frontend = await engines(ServedModel("a", EngineOptions()), None)
    await sleeping.put("a", frontend)  # type: ignore[arg-type]
    assert engines.of("a").closed.is_set() and "a" not in sleeping


async def test_sleep_needs_models_that_make_room_for_each_other() -> None:
    serving = ServeOptions(models="m.yaml", models_asleep="1G")
    one = ServedModel("a", EngineOptions(), replicas=ReplicaOptions(replicas=2))
    for models, why in (([ServedModel("a", EngineOptions())], "one model stays"), ([one, one], "all models have rep")):
        with pytest.raises(ConfigError, match=f"models_asleep has no effect: {why}"):
            await open_model_pool(models, serving)


async def test_engines_answer_after_a_sleep_as_before_and_are_the_same_processes(tmp_path: Path) -> None:
    path = str(thinking_model.make(tmp_path / "model", 1))
    models = [ServedModel(name, EngineOptions.of(model=path, kv_memory="16M", max_model_len=256)) for name in "ab"]
    serving = ServeOptions(models="m.yaml", max_loaded_models=1, models_asleep="1G", spare_engine=False)
    pool = await open_model_pool(models, serving, RestartPolicy(max_restarts=3))

    async def answer(lease: Lease) -> tuple[list[int], int]:
        client, params = lease.frontend.client, SamplingParams(temperature=0, max_tokens=8)
        assert isinstance(client, AsyncClient) and client.pid is not None
        found = await lease.frontend.collect(lease.frontend.prepare("Once upon a time", params))
        lease.release()
        return found.outputs[0].token_ids, client.pid

    try:
        first, a = await answer(await pool.acquire("a"))
        second, b = await answer(await pool.acquire("b"))
        assert second == first and b != a
        assert states(pool) == {"a": "asleep", "b": "loaded"}
        assert await answer(await pool.acquire("a")) == (first, a)
        assert states(pool) == {"a": "loaded", "b": "asleep"}
        assert (await pool.loaded()["a"].client.stats()).sleep_level == 0
        os.kill(b, signal.SIGKILL)
        async with asyncio.timeout(60):
            while states(pool)["b"] != "unloaded":
                await asyncio.sleep(0.01)
        assert pool.restarts() == 0
    finally:
        await pool.close()


async def test_an_unload_that_comes_as_an_engine_is_about_to_sleep_ends_it() -> None:
    engines = Engines()
    pool = pool_of(engines, "ab", asleep=10)
    await use(pool, "a")
    pool._unload(pool._models["a"], "idle", sleep=True)
    assert await pool.unload("a")
    await settled()
    assert states(pool)["a"] == "unloaded" and engines.of("a").closed.is_set()
    await pool.close()


async def test_the_log_says_which_engines_end_for_want_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="quire.engine.sleeping_engines")
    engines = Engines("cpu", a=6, b=6, c=11)
    pool = pool_of(engines, "abc", asleep=10)
    await use(pool, "a", "b", "c", "a")
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "engines asleep that end, to make room in models_asleep for b: a",
        "the engine of model c ends: its 0.00 GiB do not fit into models_asleep",
    ]
    await pool.close()


async def first_asleep(engines: Engines) -> ModelPool:
    """Of two models, of which one fits, the second is loaded and the first sleeps."""
    pool = pool_of(engines, "ab", asleep=10)
    await pool.start()
    (await pool.acquire("b")).release()
    return pool


def test_operators_see_and_wake_an_engine_that_the_pool_put_to_sleep() -> None:
    engines = Engines()
    with background_server(partial(first_asleep, engines)) as url:

        def asleep(model: str) -> bool:
            return bool(httpx.get(f"{url.admin}/is_sleeping", params={"model": model}).json()["is_sleeping"])

        assert asleep("a") and not asleep("b")
        assert httpx.get(f"{url.admin}/is_sleeping").json() == {"is_sleeping": False}
        assert httpx.post(f"{url.admin}/v1/engine/sleep", params={"model": "a"}).json() == {"asleep": True}
        assert httpx.post(f"{url.admin}/v1/engine/wake", params={"model": "a"}).json() == {"asleep": False}
        assert asleep("b") and not asleep("a") and engines.opened == {"a": 1, "b": 1}


def test_a_wake_finds_the_engine_that_sleeps_beside_a_model_that_is_not_loaded() -> None:
    engines = Engines()

    async def started() -> ModelPool:
        pool = await first_asleep(engines)
        await pool.unload("a")
        await pool._unload(pool._models["b"], "idle", sleep=True)
        return pool

    with background_server(started) as url:

        def asleep() -> bool:
            return bool(httpx.get(f"{url.admin}/is_sleeping").json()["is_sleeping"])

        assert asleep() and httpx.post(f"{url.admin}/wake_up").json() == {"asleep": False}
        assert not asleep() and engines.opened["b"] == 1


def test_levels_of_sleep_hold_for_engines_that_the_pool_put_to_sleep() -> None:
    engines = Engines()
    with background_server(partial(first_asleep, engines)) as url:
        refused = httpx.post(f"{url.admin}/sleep", params={"model": "a", "level": 7})
        assert refused.status_code == 400 and "levels 1 and 2, not 7" in refused.json()["error"]["message"]
        assert httpx.post(f"{url.admin}/sleep", params={"model": "a", "level": 2}).json() == {"asleep": True}
        assert engines.of("a").closed.is_set()


def test_where_all_engines_sleep_a_wake_wakes_the_first() -> None:
    engines = Engines()

    async def started() -> ModelPool:
        pool = pool_of(engines, "ab", asleep=10)
        await pool.start()
        await pool._unload(pool._models["a"], "idle", sleep=True)
        return pool

    with background_server(started) as url:
        assert httpx.get(f"{url.admin}/is_sleeping").json() == {"is_sleeping": True}
        assert httpx.post(f"{url.admin}/wake_up").json() == {"asleep": False}
        assert httpx.get(f"{url.admin}/is_sleeping").json() == {"is_sleeping": False} and engines.opened == {"a": 1}
