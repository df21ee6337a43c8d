"""The pool of models: loads on demand, leases, who goes for whom, and what becomes of those who wait."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar

import pytest
from fake_frontend import FakeClient, FakeFrontend
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine import pooled_model
from quire.engine.model_eviction import Candidate, GreedyDual, victims
from quire.engine.model_pool import Lease, ModelPool, PoolLimits
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError, EngineDeadError, InputError, ModelFileError, OverloadedError, QuireError
from quire.types.events import EngineStats
from quire.types.messages import AdapterInfo
from quire.types.models_file import ServedModel


class Client(FakeClient):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.gone: asyncio.Future[QuireError] = asyncio.get_running_loop().create_future()

    async def stats(self) -> EngineStats:
        return EngineStats(kv_bytes=self.size)

    async def lost(self) -> QuireError:
        return await self.gone

    async def load_adapter(self, name: str, path: str) -> None:
        if path == "gone":
            raise InputError(f"{path} holds no adapter")
        self.adapters = [*self.adapters, AdapterInfo(name, path)]


class Opener:
    """Starts fakes; `gate` holds loads up, `broken` has them fail, `sizes` says what each takes."""

    def __init__(self, **sizes: int) -> None:
        self.opened: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()
        self.broken = False
        self.sizes = sizes
        self.loaded: dict[str, Client] = {}

    async def __call__(self, model: ServedModel, earlier: object) -> FakeFrontend:
        self.opened[model.name] += 1
        await self.gate.wait()
        if self.broken:
            raise ModelFileError("the file is broken")
        frontend = FakeFrontend()
        frontend.model_name = model.name
        self.loaded[model.name] = frontend.client = Client(self.sizes.get(model.name, 1))
        return frontend


def pool_of(open_model: Opener, *names: str, limits: PoolLimits | None = None, **changes: object) -> ModelPool:
    models = [ServedModel(name, EngineOptions(), **changes) for name in names]  # type: ignore[arg-type]
    return ModelPool(models, open_model, limits, lambda model: open_model.sizes.get(model.name, 1))  # type: ignore[arg-type]


ONE = PoolLimits(models=1)


async def settled(until: Callable[[], bool] = lambda: False) -> None:
    """Let everything run that can."""
    for _ in range(50):
        if until():
            return
        await asyncio.sleep(0)


def states(pool: ModelPool) -> dict[str, str]:
    return {one.name: one.state for one in pool.states()}


async def test_those_who_wait_for_a_model_share_its_load() -> None:
    open_model = Opener()
    pool = pool_of(open_model, "a", "b")
    await pool.start()
    assert states(pool) == {"a": "loaded", "b": "unloaded"} and pool.default.model_name == "a"
    open_model.gate.clear()
    asked = [asyncio.create_task(pool.acquire("b")) for _ in range(5)]
    await settled()
    assert states(pool)["b"] == "loading"
    open_model.gate.set()
    leases = await asyncio.gather(*asked)
    assert open_model.opened == {"a": 1, "b": 1} and len({id(lease.frontend) for lease in leases}) == 1
    assert pool.states()[1].requests == 5
    for lease in leases:
        lease.release()
        lease.release()  # a second time does nothing
    assert pool.states()[1].requests == 0
    await pool.close()
    assert all(client.closed.is_set() for client in open_model.loaded.values())


async def test_a_pool_is_busy_while_anyone_waits_for_an_answer_or_an_engine() -> None:
    """A spare process, whose imports would slow both down, is started afterwards."""
    open_model = Opener()
    pool = pool_of(open_model, "a", "b")
    await pool.start()
    assert not pool.busy
    lease = await pool.acquire("a")
    assert pool.busy
    lease.release()
    open_model.loaded["a"].alive = False
    assert states(pool)["a"] == "restarting" and pool.busy
    open_model.loaded["a"].alive = True
    assert not pool.busy
    open_model.gate.clear()
    asked = asyncio.create_task(pool.acquire("b"))
    await settled()
    assert pool.busy
    open_model.gate.set()
    (await asked).release()
    assert not pool.busy
    await pool.close()


async def test_a_failed_load_is_told_to_all_who_wait_and_tried_again_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pooled_model, "FIRST_LOAD_PAUSE_S", 0.0)
    open_model = Opener()
    pool = pool_of(open_model, "a")
    open_model.broken = True
    failures = await asyncio.gather(*(pool.acquire("a") for _ in range(3)), return_exceptions=True)
    assert all(
        isinstance(failure, EngineDeadError) and "'a' could not be loaded" in str(failure) for failure in failures
    )
    with pytest.raises(ModelFileError, match="the file is broken"):  # who starts a server is told more
        await pool.start()
    assert open_model.opened["a"] == 2
    open_model.broken = False
    assert (await pool.acquire("a")).frontend.model_name == "a"
    assert pool.states()[0].load_failures == 2 and pool.states()[0].loads == 1


async def test_a_model_that_cannot_be_loaded_is_not_tried_for_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(pooled_model.time, "monotonic", lambda: now)
    open_model = Opener()
    pool = pool_of(open_model, "a", "b", limits=ONE)
    open_model.broken = True

    async def refused() -> EngineDeadError:
        with pytest.raises(EngineDeadError, match="'b' could not be loaded") as failure:
            await pool.acquire("b")
        assert isinstance(failure.value.__cause__, ModelFileError)
        return failure.value

    pauses = []
    for tried in range(1, 9):
        pauses.append((await refused()).retry_after)
        open_model.broken = False
        (await pool.acquire("a")).release()
        open_model.broken = True
        now += pauses[-1] - 0.25
        assert (await refused()).retry_after == 0.25
        assert open_model.opened["b"] == tried and states(pool)["a"] == "loaded"  # which did not go for it
        now += 0.25
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60] and pool.states()[1].load_failures == 8
    open_model.broken = False
    pool.forget_failure("b")
    (await pool.acquire("b")).release()
    await pool.unload("b")
    open_model.broken = True
    assert (await refused()).retry_after == 1.0  # it was well in between
    await pool.close()


async def test_a_model_in_use_stays_until_it_is_idle_and_those_behind_it_wait_their_turn() -> None:
    pool = pool_of(Opener(), "a", "b", limits=ONE)
    first = await pool.acquire("a")
    b = asyncio.create_task(pool.acquire("b"))
    await settled()
    again = asyncio.create_task(pool.acquire("a"))  # while b waits for its room, a gets nothing new
    await settled()
    assert states(pool) == {"a": "loaded", "b": "loading"} and not b.done() and not again.done()
    first.release()
    lease = await b
    assert lease.frontend.model_name == "b" and states(pool)["b"] == "loaded" and not again.done()
    lease.release()
    assert (await again).frontend.model_name == "a"
    assert {one.name: (one.loads, one.unloads) for one in pool.states()} == {"a": (2, 1), "b": (1, 1)}


async def test_the_model_that_is_to_go_is_not_changed_by_what_it_still_does() -> None:
    """Else two busy ones would take turns at being asked to go, and neither ever would."""
    pool = pool_of(Opener(), "a", "b", "c", limits=PoolLimits(models=2))
    for name in "ac":
        (await pool.acquire(name)).release()
        pool._models[name].load_s = 1.0  # neither costs more than the other
    going = [await pool.acquire("a"), await pool.acquire("a")]
    staying = await pool.acquire("c")
    b = asyncio.create_task(pool.acquire("b"))
    await settled()
    going.pop().release()  # it was used later than c now
    pool._notify()  # as when anything changes elsewhere
    await settled()
    again = asyncio.create_task(pool.acquire("c"))
    await settled()
    assert again.done() and not b.done()
    staying.release()
    going.pop().release()
    assert (await b).frontend.model_name == "b" and states(pool) == {"a": "unloaded", "b": "loaded", "c": "loaded"}


async def test_who_waits_too_long_for_room_is_refused_and_the_others_go_on() -> None:
    pool = pool_of(Opener(), "a", "b", limits=PoolLimits(models=1, wait=0.01))
    held = await pool.acquire("a")
    with pytest.raises(OverloadedError, match="no room for model 'b': 'a' stayed in use") as refusal:
        await pool.acquire("b")
    assert refusal.value.retry_after > 0
    assert (await pool.acquire("a")).frontend is held.frontend  # it takes requests again


async def test_pinned_models_stay() -> None:
    open_model = Opener()
    models = [ServedModel("a", EngineOptions(), pinned=True), *(ServedModel(n, EngineOptions()) for n in "bc")]
    pool = ModelPool(models, open_model, PoolLimits(models=2))  # type: ignore[arg-type]
    await pool.start()
    for name in "bcbc":
        (await pool.acquire(name)).release()
    assert not await pool.unload("a")
    assert states(pool) == {"a": "loaded", "b": "unloaded", "c": "loaded"} and open_model.opened["a"] == 1
    with pytest.raises(ConfigError, match="1 leaves no room for others beside 1 that are pinned"):
        ModelPool(models, open_model, PoolLimits(models=1))  # type: ignore[arg-type]
    await pool.close()


async def test_models_go_when_idle_for_as_long_as_they_are_kept() -> None:
    pool = pool_of(Opener(), "a", keep_alive=0.0)
    lease = await pool.acquire("a")
    assert states(pool) == {"a": "loaded"}
    lease.release()
    await settled(lambda: states(pool)["a"] == "unloaded")
    assert states(pool) == {"a": "unloaded"}
    lease = await pool.acquire("a")
    lease.keep_alive = 3600.0  # a request's own word counts from then on
    lease.release()
    (await pool.acquire("a")).release()
    [state] = pool.states()
    assert state.state == "loaded" and state.expires_at is not None
    lease = await pool.acquire("a")
    lease.keep_alive = math.inf
    lease.release()
    assert pool.states()[0].expires_at is None
    await pool.unload("a")
    await settled(lambda: states(pool)["a"] == "unloaded")
    assert states(pool) == {"a": "unloaded"}


async def test_a_model_asked_to_go_while_in_use_goes_afterwards() -> None:
    pool = pool_of(Opener(), "a")
    lease = await pool.acquire("a")
    await pool.unload("a")
    assert states(pool) == {"a": "loaded"}
    lease.release()
    await settled(lambda: states(pool)["a"] == "unloaded")
    assert states(pool) == {"a": "unloaded"}


async def test_who_gives_up_waiting_holds_nothing() -> None:
    open_model = Opener()
    pool = pool_of(open_model, "a")
    open_model.gate.clear()
    early, late = (asyncio.create_task(pool.acquire("a")) for _ in range(2))
    await settled()
    early.cancel()
    open_model.gate.set()
    await settled(lambda: pool.states()[0].requests > 0)
    late.cancel()  # it has its lease, and has not seen it yet
    await asyncio.wait([early, late])
    assert states(pool) == {"a": "loaded"} and pool.states()[0].requests == 0


async def test_a_load_that_nobody_waits_for_any_more_makes_no_room(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.engine.model_pool")
    open_model = Opener()
    pool = pool_of(open_model, "a", "b", "c", limits=ONE)
    held = await pool.acquire("a")
    asked = [asyncio.create_task(pool.acquire("b")) for _ in range(2)]
    behind = asyncio.create_task(pool.acquire("c"))
    await settled()
    assert "model b waits for room: a in use" in caplog.messages
    assert "model c waits for room, behind others" in caplog.messages
    asked.pop().cancel()
    await settled()
    assert pool.acquire_loaded("a") is None  # the other still waits
    asked.pop().cancel()
    behind.cancel()
    await settled()
    again = pool.acquire_loaded("a")
    assert again is not None and states(pool) == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
    assert caplog.messages.count("loading model b is given up: nobody waits for it any more") == 1
    again.release()
    held.release()
    assert (await pool.acquire("b")).frontend.model_name == "b" and open_model.opened == {"a": 1, "b": 1}
    await pool.close()


async def test_who_comes_while_a_load_is_being_given_up_is_served() -> None:
    pool = pool_of(Opener(), "a", "b", limits=ONE)
    held = await pool.acquire("a")
    gone = asyncio.create_task(pool.acquire("b"))
    await settled()
    gone.cancel()
    late = asyncio.create_task(pool.acquire("b"))
    await settled()
    assert states(pool)["b"] == "loading"
    held.release()
    assert (await late).frontend.model_name == "b"
    await pool.close()


async def test_a_model_asked_to_go_while_it_is_loaded_goes_when_its_requests_have_ended() -> None:
    open_model = Opener()
    pool = pool_of(open_model, "a")
    open_model.gate.clear()
    asked = asyncio.create_task(pool.acquire("a"))
    await settled()
    await pool.unload("a")
    open_model.gate.set()
    lease = await asked
    assert states(pool) == {"a": "loaded"}
    lease.release()
    await settled(lambda: states(pool)["a"] == "unloaded")
    assert states(pool) == {"a": "unloaded"}
    await pool.unload("a")  # of one that is not there: it means nothing for the next stay
    (await pool.acquire("a")).release()
    await settled()
    assert states(pool) == {"a": "loaded"}
    await pool.close()


async def test_an_engine_that_is_lost_is_started_anew_for_the_next_request() -> None:
    open_model = Opener()
    pool = pool_of(open_model, "a", "b")
    lease = await pool.acquire("a")
    open_model.loaded["a"].gone.set_result(EngineDeadError("it died too often"))
    await settled(lambda: states(pool)["a"] == "unloaded")
    assert states(pool)["a"] == "unloaded"
    fresh = await pool.acquire("a")
    lease.release()  # of the one that is gone: the new one is still held
    assert fresh.frontend is not lease.frontend and pool.states()[0].requests == 1
    await pool.close()


async def test_a_model_whose_engine_restarts_says_so() -> None:
    open_model = Opener()
    pool = pool_of(open_model, "a")
    (await pool.acquire("a")).release()
    open_model.loaded["a"].alive = False
    assert states(pool) == {"a": "restarting"}
    open_model.loaded["a"].alive = True
    assert states(pool) == {"a": "loaded"}
    await pool.close()


async def test_what_ends_an_idle_model_is_logged_on_behalf_of_nobody(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.engine.model_pool")
    request, behalf = ContextVar("request", default=""), dict[str, str]()
    caplog.handler.addFilter(lambda record: not behalf.update({record.getMessage(): request.get()}))
    request.set("r1")
    open_model = Opener()
    pool = pool_of(open_model, "a", "b")
    (await pool.acquire("a")).release()
    lease = await pool.acquire("b")
    lease.keep_alive = 0.0
    lease.release()
    open_model.loaded["a"].gone.set_result(EngineDeadError("it died too often"))
    await settled(lambda: states(pool) == {"a": "unloaded", "b": "unloaded"})
    assert behalf["loading model a"] == "r1"
    assert behalf["unloading model b: idle"] == behalf["unloading model a: its engine is gone"] == ""
    await pool.close()


async def test_room_is_counted_in_bytes_too() -> None:
    open_model = Opener(a=40, b=30, c=60)
    pool = pool_of(open_model, "a", "b", "c", limits=PoolLimits(bytes=100))
    for name in "ab":
        (await pool.acquire(name)).release()
    assert states(pool) == {"a": "loaded", "b": "loaded", "c": "unloaded"}
    (await pool.acquire("c")).release()
    assert states(pool)["c"] == "loaded" and sum(s.bytes for s in pool.states() if s.state == "loaded") <= 100
    with pytest.raises(ConfigError, match="more than models_memory"):
        pool_of(Opener(a=101), "a", limits=PoolLimits(bytes=100))


async def test_a_model_that_turns_out_larger_has_idle_ones_go() -> None:
    open_model = Opener()
    pool = pool_of(open_model, "a", "b", limits=PoolLimits(bytes=100))
    open_model.sizes = {"a": 60, "b": 60}  # not what was expected
    (await pool.acquire("a")).release()
    (await pool.acquire("b")).release()
    await settled(lambda: states(pool)["a"] == "unloaded")
    assert states(pool) == {"a": "unloaded", "b": "loaded"}


async def test_adapters_come_back_with_their_model() -> None:
    pool = pool_of(Opener(), "a", "b")
    lease = await pool.acquire("b")
    await lease.frontend.client.load_adapter("poet", "there")
    await lease.frontend.client.load_adapter("lost", "there")
    lease.frontend.client.adapters[1] = AdapterInfo("lost", "gone")  # type: ignore[index]
    lease.release()
    assert pool.find("poet") == pool.find("b:poet") == ("b", "poet")
    await pool.unload("b")
    assert pool.find("poet") == ("b", "poet") and pool.find("a:poet") is None  # its name is known meanwhile
    lease = await pool.acquire("b")
    assert lease.frontend.client.adapters == [AdapterInfo("poet", "there")]


async def test_a_closed_pool_ends_those_who_wait() -> None:
    open_model = Opener()
    pool = pool_of(open_model, "a")
    open_model.gate.clear()
    waiting = asyncio.create_task(pool.acquire("a"))
    await settled()
    await pool.close()
    with pytest.raises(EngineDeadError):
        await waiting
    with pytest.raises(EngineDeadError):
        await pool.acquire("a")


@pytest.mark.parametrize("seed", range(8))
async def test_everybody_is_served_within_the_limits(seed: int) -> None:
    """Random requests for five models of which few fit: all get their model, none that is in use goes."""
    rng = random.Random(seed)
    open_model = Opener(**{name: rng.randrange(10, 50) for name in "abcde"})
    limits = PoolLimits(models=rng.choice((1, 2, 3)), bytes=rng.choice((50, 100, None)))
    pool = pool_of(open_model, *"abcde", limits=limits, keep_alive=rng.choice((0.0, math.inf)))
    held: list[Lease] = []

    async def request(name: str) -> None:
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
        lease = await pool.acquire(name)
        held.append(lease)
        for _ in range(rng.randrange(20)):
            loaded = [one for one in pool.states() if one.state == "loaded"]
            assert lease.frontend.model_name == name and not lease.frontend.client.closed.is_set()  # type: ignore[attr-defined]
            assert limits.models is None or len(loaded) <= limits.models
            assert limits.bytes is None or sum(one.bytes for one in loaded) <= limits.bytes
            await asyncio.sleep(0)
        held.remove(lease)
        lease.release()

    tasks = [asyncio.create_task(request(rng.choice("abcde"))) for _ in range(60)]
    for task in rng.sample(tasks, 10):
        await asyncio.sleep(0)
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    for lease in held:
        lease.release()
    assert all(one.requests == 0 for one in pool.states())
    await pool.close()


# ---- the policy ------------------------------------------------------------------------------------------------

CANDIDATES = st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=6).map(
    lambda found: [Candidate(str(at), size, idle) for at, (size, idle) in enumerate(found)]
)


@given(CANDIDATES, st.integers(-1, 6), st.integers(-5, 40))
def test_victims_free_enough_and_none_goes_in_vain(candidates: list[Candidate], models: int, size: int) -> None:
    chosen = victims(candidates, models, size)
    if chosen is None:
        assert len(candidates) < models or sum(one.size for one in candidates) < size
        return
    assert len(chosen) >= models and sum(one.size for one in chosen) >= size
    for one in chosen:
        rest = [other for other in chosen if other is not one]
        assert len(rest) < models or sum(other.size for other in rest) < size


@given(st.lists(st.integers(0, 5), max_size=60))
def test_with_equal_costs_the_least_recently_used_goes(uses: list[int]) -> None:
    policy, recent = GreedyDual(), dict[str, None]()
    for use in uses:
        name = str(use)
        if name not in recent and len(recent) == 3:
            gone = policy.in_order([Candidate(one, 1, True) for one in recent])[0].name
            assert gone == next(iter(recent))
            policy.evicted(gone)
            del recent[gone]
        recent.pop(name, None)
        recent[name] = None
        policy.used(name, 2.5)


@settings(max_examples=50)
@given(st.floats(0.1, 100), st.floats(0.1, 100))
def test_what_costs_more_stays_longer_but_not_for_ever(cheap: float, dear: float) -> None:
    """Models that are used in turn push out one that is not, later the more it costs to load."""
    cheap, dear = sorted((cheap, dear))
    policy, lasted = GreedyDual(), 0
    policy.used("dear", dear)
    while True:
        policy.used(str(lasted), cheap)
        gone = policy.in_order([Candidate("dear", 1, True), Candidate(str(lasted), 1, True)])[0].name
        policy.evicted(gone)
        if gone == "dear":
            break
        lasted += 1
    assert lasted == pytest.approx(dear / cheap, abs=1.01)


def test_idle_ones_go_before_those_in_use() -> None:
    policy = GreedyDual()
    policy.used("idle", 100.0)
    policy.used("busy", 1.0)
    order = policy.in_order([Candidate("busy", 1, False), Candidate("idle", 1, True)])
    assert [one.name for one in order] == ["idle", "busy"]
