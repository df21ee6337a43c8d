"""Sessions: pages that stay while a tool runs, within a quota, and go down a tier rather than be lost."""

from test_scheduler_property import FULL, World

from quire.types.fake_tiers import FakeTiers
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams
from quire.types.transfer import TierSpec


def world(pages=41, **options):
    tiers = FakeTiers((TierSpec("host", 100),), 4, seed=1)
    return World((FULL,), policy="fcfs", depth=1, seed=1, pages=pages, tiers=tiers, **options)


def ask(world, name, prompt, *, session="", hold=100.0, salt="", tokens=4):
    params = SamplingParams(max_tokens=tokens, seed=0, stop_token_ids=[])
    request = Request(id=name, prompt=prompt, params=params, session=session, hold=hold, salt=salt)
    world.requests[name] = request
    world.scheduler.submit(request)
    for _ in range(500):
        if (name, 0) in world.ended:
            return world.outputs[name, 0]
        world.step()
        world.scheduler.check()
    raise AssertionError("no answer")


def test_a_session_is_held_until_its_time_is_up():
    it = world()
    ask(it, "a", list(range(30)), session="agent", hold=5.0)
    (held,) = it.scheduler.features.sessions.view(it.now)
    assert held.session == "agent" and held.pages == 8 and it.scheduler.memory.pool.used == 8
    it.now += 10
    ask(it, "b", [1, 2, 3])
    assert it.scheduler.features.sessions.view(it.now) == [] and it.scheduler.memory.pool.used == 0


def test_the_next_turn_finds_it_and_replaces_it():
    it = world(session_quota=0.5)
    first = list(range(30))
    answer = ask(it, "a", first, session="agent")
    ask(it, "b", [*first, *answer, 9, 9], session="agent")
    assert it.scheduler.stats.cached_tokens == 33
    assert len(it.scheduler.features.sessions.view(it.now)) == 1


def test_a_tenant_holds_no_more_than_its_quota():
    it = world(session_quota=0.25)  # 10 pages
    for i in range(4):
        ask(it, f"r{i}", [i] * 22, session=f"s{i}", salt="tenant")
    ask(it, "other", [7] * 22, session="s", salt="else")
    held = it.scheduler.features.sessions.view(it.now)
    assert sum(s.pages for s in held if s.session != "s") <= 10 and held[-1].session == "s"
    assert [s.session for s in held[:-1]] == ["s3"]  # the latest


def test_under_pressure_pages_go_down_a_tier_and_come_back():
    it = world(pages=21)
    first = list(range(30))
    answer = ask(it, "a", first, session="agent", hold=1000.0)
    for i in range(6):
        ask(it, f"big{i}", [40 + i] * 60)
    assert it.scheduler.features.sessions.view(it.now) == []
    ask(it, "b", [*first, *answer, 9, 9])
    assert it.scheduler.features.tiers.directory.tier("host").stats.hit_tokens > 0
