"""The step loop over the fake executor: depth, failure, links and the async client."""

import asyncio
import hashlib
import threading
import time
from concurrent.futures import Future

import msgspec
import pytest
from msgspec.structs import replace

from quire.engine import cache_orders as cache
from quire.engine.client import AsyncClient
from quire.engine.core import MAX_FAILURES, EngineCore
from quire.engine.link import LocalLink
from quire.types.cache_control import CacheOrder
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError, EngineDeadError, InputError, OverloadedError
from quire.types.fakes import FakeExecutor, fake_token
from quire.types.grammar import GrammarSpec
from quire.types.kv import KVGroup, KVLayout
from quire.types.messages import Abort, EngineInfo, Events, GetStats, Query, Reply, Submit
from quire.types.plan import Capacity
from quire.types.request import FinishReason, Request
from quire.types.sampling_params import SamplingParams

LAYOUT = KVLayout((KVGroup(layers=(0,), tokens_per_page=4, kv_heads=1, head_dim=1),), "float32")
VOCAB = 97


class Flaky(FakeExecutor):
    """Fails the steps it is told to, and takes as many as it is let. Asleep it has no pages to read or write."""

    failing = 0
    gate = None
    asleep = False

    def sleep(self, pages, level):
        super().sleep(pages, level)
        self.asleep = True

    def wake(self, on_progress):
        super().wake(on_progress)
        self.asleep = False

    def read_pages(self, pages):
        assert not self.asleep
        return super().read_pages(pages)

    def write_pages(self, pages, content):
        assert not self.asleep and pages
        super().write_pages(pages, content)

    def submit(self, plan):
        assert not self.asleep
        if self.gate is not None:
            assert self.gate.acquire(timeout=60)
        if self.failing:
            self.failing -= 1
            raise RuntimeError("device on fire")
        return super().submit(plan)


def core(depth=1, layout=LAYOUT, clock=time.monotonic, **options):
    capacity = Capacity(pages=64, slots=4, max_model_len=60, max_batch_tokens=16, depth=depth)
    return EngineCore(EngineOptions.of(**options), Flaky(layout, capacity, vocab=VOCAB), clock=clock)


def link(depth=1):
    info = EngineInfo("fake", 60, VOCAB, 63, 4, 16, depth, "none", "none", [])
    return LocalLink(core(depth), info)


def ask(name, prompt, **params):
    return Request(id=name, prompt=prompt, params=SamplingParams(**{"max_tokens": 6, "seed": 1, **params}))


def expected(prompt, count, branch=0):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_token(tokens, 1, branch, VOCAB))
    return tokens[len(prompt) :]


def run(engine):
    out = {}
    while engine.busy:
        for event in engine.step():
            out.setdefault(event.request, []).extend(event.tokens)
    return out


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_any_depth_gives_the_same_tokens(depth):
    engine = core(depth)
    prompts = {f"r{i}": [i, *range(3 * i + 1)] for i in range(9)}
    for name, prompt in prompts.items():
        engine.submit(ask(name, prompt))
    assert run(engine) == {name: expected(prompt, 6) for name, prompt in prompts.items()}


def test_depth_two_plans_the_next_step_before_the_first_is_read():
    engine = core(2)
    engine.submit(ask("a", [1, 2, 3]))
    assert engine.step() == [], "the first step is in flight, nothing was read yet"
    assert [e.index for e in engine.step()] == [0]


@pytest.mark.parametrize(("depth", "count", "first"), [(2, 150, 64), (2, 64, 64), (2, 40, 40), (1, 150, 150)])
def test_of_a_burst_the_first_step_is_launched_before_all_is_taken_in(depth, count, first):
    capacity = Capacity(pages=1024, slots=200, max_model_len=60, max_batch_tokens=16, depth=depth)
    engine = LocalLink(EngineCore(EngineOptions(), Flaky(LAYOUT, capacity, vocab=VOCAB)), None)
    known, submit = [], engine.core.executor.submit

    def launch(plan):
        known.append(len(engine.core.scheduler.sequences.requests))
        return submit(plan)

    engine.core.executor.submit = launch
    prompts = {f"r{i}": [i % 90, 1 + i // 90] for i in range(count)}
    engine.send(*(Submit(ask(name, prompt)) for name, prompt in prompts.items()))
    out = {}
    while engine.core.busy:
        for message in engine.receive(None):
            for event in message.events:
                out.setdefault(event.request, []).extend(event.tokens)
    assert known[0] == first
    assert out == {name: expected(prompt, 6) for name, prompt in prompts.items()}


def test_a_failed_step_ends_its_requests_and_the_engine_keeps_serving():
    engine = core(2)
    engine.submit(ask("doomed", [1, 2]))
    engine.step()
    engine.executor.failing = 1
    (event,) = engine.step()
    assert event.finish is FinishReason.ERROR and "on fire" in event.message
    engine.submit(ask("next", [1, 2]))
    assert run(engine)["next"] == expected([1, 2], 6)
    engine.scheduler.check()


def test_slots_that_a_failed_step_was_to_free_are_free():
    engine = core()
    engine.submit(ask("short", [1, 2], max_tokens=2))
    engine.submit(ask("long", [3, 4], max_tokens=20))
    while "short" in engine.scheduler.sequences.requests:
        engine.step()
    assert engine.scheduler.sequences.freed
    engine.executor.failing = 1
    run(engine)
    for name in "abcd":
        engine.submit(ask(name, [5, ord(name) % VOCAB]))
    assert {name: len(tokens) for name, tokens in run(engine).items()} == dict.fromkeys("abcd", 6)


@pytest.mark.parametrize("abandoned", [False, True])
def test_steps_beyond_the_last_answer_are_taken_in(abandoned):
    """Whoever has all that was asked for may not ask again for long, and what is in flight holds pages until then."""
    engine = link(depth=2)
    prompt = [1, 2, 3]
    stop = [] if abandoned else [expected(prompt, 3)[-1]]
    engine.send(Submit(ask("a", prompt, max_tokens=30, stop_token_ids=stop)))
    for _ in range(4):
        engine.receive(0)
    if abandoned:
        engine.send(Abort("a"))
    assert not engine.core.scheduler.sequences.requests
    assert not engine.core.busy and not engine.core.scheduler.memory.pool.used
    engine.core.power(asleep=True)


def test_a_step_that_fails_beyond_the_last_answer_is_got_over(monkeypatch):
    engine = link(depth=2)
    engine.send(Submit(ask("a", [1, 2, 3], max_tokens=30)))
    for _ in range(4):
        engine.receive(0)
    assert engine.core._tickets
    monkeypatch.setattr(engine.core.scheduler, "commit", lambda *_: 1 / 0)
    engine.send(Abort("a"))
    monkeypatch.undo()
    assert not engine.core._tickets
    engine.send(Submit(ask("b", [1, 2, 3])))
    assert run(engine.core)["b"] == expected([1, 2, 3], 6)


def test_cache_orders_wake_a_sleeping_engine():
    engine, prompt = core(), list(range(13))
    engine.submit(ask("a", prompt))
    run(engine)
    engine.power(asleep=True)
    _, data = engine.cache(CacheOrder(action="export", tokens=prompt))
    engine.power(asleep=True)
    engine.reset()
    engine.power(asleep=True)
    assert engine.cache(CacheOrder(action="look"))[0].device_cached == 0
    assert engine.executor.asleep, "looking wakes nobody"
    assert engine.cache(CacheOrder(action="import", data=data))[0].pages == 3
    engine.scheduler.check()


def test_a_bundle_of_nothing():
    engine = core()
    with pytest.raises(InputError, match="warm it first"):
        engine.cache(CacheOrder(action="export", tokens=list(range(13))))
    body = msgspec.msgpack.encode(cache.Bundle(cache.VERSION, f"{engine.executor.kind} {LAYOUT}", [], []))
    data = body + hashlib.blake2b(body, digest_size=cache.CHECKSUM_BYTES).digest()
    assert engine.cache(CacheOrder(action="import", data=data))[0].pages == 0


def test_a_bundle_has_no_pages_of_a_window_that_moved_on():
    """What was read from nowhere must not come back as the pages of the first part."""
    window = KVGroup(layers=(1,), tokens_per_page=8, kv_heads=1, head_dim=1, window=11)
    engine, prompt = core(layout=KVLayout((*LAYOUT.groups, window), "float32")), list(range(1, 49))
    engine.submit(ask("a", prompt, max_tokens=2))
    run(engine)
    _, data = engine.cache(CacheOrder(action="export", tokens=prompt))
    engine.cache(CacheOrder(action="drop"))
    assert engine.cache(CacheOrder(action="import", data=data))[0].pages < 12 + 6
    engine.submit(ask("b", [*prompt, 9], max_tokens=2))
    assert run(engine)["b"] == expected([*prompt, 9], 2) and engine.stats().cached_tokens == 48
    engine.submit(ask("c", [*prompt[:16], 80, 81], max_tokens=2))
    assert run(engine)["c"] == expected([*prompt[:16], 80, 81], 2)


def test_an_engine_that_only_fails_gives_up():
    engine = core()
    engine.executor.failing = MAX_FAILURES
    with pytest.raises(EngineDeadError, match="on fire"):
        for i in range(MAX_FAILURES):
            engine.submit(ask(f"r{i}", [1]))
            engine.step()


def test_link_refuses_by_event():
    one = link()
    one.send(Submit(ask("a", [])))
    ((event,),) = [m.events for m in one.receive(0)]
    assert event.finish is FinishReason.ERROR and event.error == "InputError:prompt"


def test_link_answers_stats_and_aborts():
    one = link()
    one.send(Submit(ask("a", [1, 2, 3])))
    one.receive(0)
    one.send(Query(GetStats()))
    one.send(Abort("a"))
    messages = one.receive(0)
    assert [type(m) for m in messages] == [Reply, Events]
    assert messages[1].events[0].finish is FinishReason.ABORT and not one.core.busy


async def collect(client, request):
    out, finishes = {}, []
    async for events in client.submit(request):
        for event in events:
            out.setdefault(event.branch, []).extend(event.tokens)
            finishes += [event.finish] if event.finish else []
    return out, finishes


async def test_client_streams_many_at_once():
    client = AsyncClient(link(2))
    requests = [ask(f"r{i}", [i, 1, 2], n=1 + i % 3) for i in range(20)]
    results = await asyncio.gather(*(collect(client, r) for r in requests))
    for request, (out, finishes) in zip(requests, results, strict=True):
        assert out == {b: expected(request.prompt, 6, b) for b in range(request.params.n)}
        assert finishes == [FinishReason.LENGTH] * request.params.n
    assert (await client.stats()).running == 0
    await client.close()


async def test_leaving_a_stream_aborts_the_request():
    one = link()
    gate = one.core.executor.gate = threading.Semaphore(1)
    client = AsyncClient(one)
    stream = client.submit(ask("a", [1], max_tokens=50))
    await anext(stream)
    await stream.aclose()
    gate.release(5)
    while one.core.busy:
        await asyncio.sleep(0.001)
    assert (await client.stats()).finished == {FinishReason.ABORT: 1}
    await client.close()


async def test_a_dead_engine_ends_every_stream():
    one = link()
    one.core.executor.failing = 10**9
    client = AsyncClient(one)
    with pytest.raises(EngineDeadError):
        for i in range(MAX_FAILURES + 1):
            out, finishes = await collect(client, ask(f"r{i}", [1]))
            assert finishes == [FinishReason.ERROR] and not out[0]
    assert not client.alive
    with pytest.raises(EngineDeadError):
        await client.stats()
    await client.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_frees_pages_within_two_steps(depth):
    engine = core(depth)
    engine.submit(ask("gone", list(range(30)), max_tokens=30))
    engine.submit(ask("stays", [1, 2, 3], max_tokens=30))
    for _ in range(6):
        engine.step()
    held = engine.stats().pages_used
    engine.abort("gone")
    for _ in range(2):
        engine.step()
    engine.scheduler.check()
    assert engine.stats().pages_used <= held - 30 // 4
    engine.abort("stays")
    for _ in range(2):
        engine.step()
    assert engine.stats().pages_used == 0 and not engine.busy


@pytest.mark.parametrize("depth", [1, 2])
def test_deadlines_end_work_in_the_queue_and_under_way(depth):
    now = [100.0]
    engine = core(depth, clock=lambda: now[0])
    deadlines = {"queued": 104.0, "running": 105.0}
    for name in ("running", "b", "c", "d", "queued", "patient"):  # there are four slots
        request = ask(name, [ord(name[0])] * 3, max_tokens=50)
        request.deadline = deadlines.get(name, 0.0)
        engine.submit(request)

    def ended():
        return [(e.request, e.finish, e.error) for e in engine.step() if e.finish]

    assert not any(ended() for _ in range(4))
    now[0] = 104.0
    assert ended() == [("queued", FinishReason.ERROR, "DeadlineError")]
    assert not ended()
    now[0] = 105.0
    assert ended() == [("running", FinishReason.ERROR, "DeadlineError")]
    assert run(engine)["patient"][-40:] == expected([ord("p")] * 3, 50)[-40:]
    assert engine.stats().pages_used == 0
    engine.scheduler.check()


@pytest.mark.parametrize("second", [104.0, 105.0])
def test_an_id_that_is_used_again_ends_by_its_own_deadline(second):
    now = [100.0]
    engine = core(clock=lambda: now[0])
    for deadline in (105.0, second):
        request = ask("again", [1, 2, 3], max_tokens=50)
        request.deadline = deadline
        engine.abort("again")
        engine.submit(request)
    now[0] = 106.0
    assert [(e.request, e.error) for e in engine.step() if e.finish] == [("again", "DeadlineError")]
    assert not engine.step() and engine.stats().pages_used == 0


def test_deadlines_of_finished_requests_are_forgotten():
    engine = core()
    for i in range(1000):
        request = ask(f"r{i}", [1, 2, 3], max_tokens=1)
        request.deadline = 1e12
        engine.submit(request)
        run(engine)
    assert len(engine.scheduler._deadlines) < 100


class Compiling(FakeExecutor):
    """Hands out the futures it is given."""

    futures: dict

    def prepare(self, grammar):
        return self.futures[grammar.source]


def test_a_grammar_compiles_beside_the_steps_and_may_fail():
    capacity = Capacity(pages=64, slots=4, max_model_len=60, max_batch_tokens=16, depth=1)
    executor = Compiling(LAYOUT, capacity, vocab=VOCAB)
    executor.futures = {name: Future() for name in ("slow", "wrong", "broken", "left")}
    engine = EngineCore(EngineOptions.of(), executor)
    for name in executor.futures:
        engine.submit(ask(name, [1, 2], grammar=GrammarSpec("regex", name)))
    with pytest.raises(InputError, match="in use"):
        engine.submit(ask("slow", [1], grammar=GrammarSpec("regex", "slow")))
    engine.submit(ask("plain", [3, 4]))
    executor.futures["wrong"].set_exception(InputError("makes no sense"))
    executor.futures["broken"].set_exception(RuntimeError("no memory"))
    (left,) = engine.abort("left")
    assert left.finish is FinishReason.ABORT
    events = []
    while not any(e.request == "plain" and e.finish for e in events):
        events += engine.step()
    ends = {e.request: (e.finish, e.error, e.message) for e in events if e.finish}
    assert ends["wrong"] == (FinishReason.ERROR, "InputError", "makes no sense")
    assert ends["broken"][:2] == (FinishReason.ERROR, "QuireError") and "no memory" in ends["broken"][2]
    assert "slow" not in ends and engine.busy
    executor.futures["slow"].set_result(None)
    events = []
    while engine.busy:
        events += engine.step()
    assert [e.finish for e in events if e.finish] == [FinishReason.LENGTH]


def test_a_sleeping_engine_keeps_cached_prefixes_and_wakes_for_a_request():
    engine = core()
    prompt = list(range(13))
    for name in ("a", "same"):  # the page that the second ends in holds what another has
        engine.submit(ask(name, prompt, max_tokens=2))
    with pytest.raises(OverloadedError, match="under way"):
        engine.power(asleep=True)
    first = run(engine)
    kept = len(engine.executor._kv)
    engine.power(asleep=True)
    assert 0 < len(engine.executor._kv) < kept, "only what may be read again is kept"
    engine.submit(ask("b", prompt, max_tokens=2))
    again = run(engine)
    assert again["b"] == first["a"]
    assert engine.stats().cached_tokens == 12 + 12
    engine.power(asleep=True)
    engine.power(asleep=False)
    engine.power(asleep=False)
    engine.scheduler.check()


def test_asleep_no_more_is_kept_than_host_memory_has_room_for(monkeypatch):
    engine, slept = core(), []
    old, late = list(range(13)), list(range(50, 63))
    answers = {}
    for name, prompt in (("old", old), ("late", late)):
        engine.submit(ask(name, prompt, max_tokens=2))
        answers |= run(engine)
    cached, sleep = engine.stats().pages_cached, engine.executor.sleep
    monkeypatch.setattr(engine.executor, "sleep", lambda pages, level: slept.append(pages) or sleep(pages, level))
    monkeypatch.setattr(FakeExecutor, "room_asleep", lambda self: cached // 2)
    engine.power(asleep=True)
    assert len(slept[0]) == engine.stats().pages_cached == cached // 2 < cached
    engine.scheduler.check()
    for name, prompt, hit in (("late", late, 12), ("old", old, 0)):  # the least recently used was dropped
        before = engine.stats().cached_tokens
        engine.submit(ask(f"{name} again", prompt, max_tokens=2))
        assert run(engine)[f"{name} again"] == answers[name] and engine.stats().cached_tokens - before == hit

    def refused(pages, level):
        raise ConfigError("not here")

    monkeypatch.setattr(engine.executor, "sleep", refused)
    there = engine.stats().pages_cached
    with pytest.raises(ConfigError, match="not here"):
        engine.power(asleep=True)
    assert engine.stats().pages_cached == there, "what does not sleep keeps what it has"


def test_levels_of_sleep(monkeypatch):
    """At 2, and where there is no other memory to wait in, nothing cached is kept; a deeper sleep wakes first."""
    engine, prompt = core(), list(range(13))
    slept = []
    sleep = engine.executor.sleep
    monkeypatch.setattr(
        engine.executor, "sleep", lambda pages, level: slept.append((len(pages), level)) or sleep(pages, level)
    )

    def ask_again(name):
        engine.submit(ask(name, prompt, max_tokens=2))
        return run(engine)[name]

    first = ask_again("a")
    for level in (1, 1, 2, 1):
        engine.power(asleep=True, level=level)
        assert engine.stats().sleep_level == slept[-1][1]
    assert slept[0][0] > 0 and slept[1:] == [(0, 2)]
    assert ask_again("b") == first and engine.stats().cached_tokens == 0 and engine.stats().sleep_level == 0
    monkeypatch.setattr(FakeExecutor, "room_asleep", lambda self: 0)
    engine.power(asleep=True)
    assert slept[-1] == (0, 1) and ask_again("c") == first and engine.stats().cached_tokens == 0
    with pytest.raises(InputError, match="levels 1 and 2, not 3"):
        engine.power(asleep=True, level=3)
    engine.scheduler.check()


@pytest.mark.parametrize("depth", [1, 2])
def test_who_ended_in_a_step_whose_commit_fails_is_told(depth, monkeypatch):
    engine = core(depth)
    for name in ("short", "long"):
        engine.submit(ask(name, [1, 2, 3], max_tokens=1 if name == "short" else 6))
    apply = engine.scheduler._commit.apply

    def failing(*step):
        apply(*step)
        raise IndexError("no such row")

    monkeypatch.setattr(engine.scheduler._commit, "apply", failing)
    ends = {}
    for _ in range(40):
        for event in engine.step():
            if event.finish is not None:
                ends[event.request] = event.finish
        if not engine.busy:
            break
    assert ends == {"short": FinishReason.LENGTH, "long": FinishReason.ERROR}
    engine.scheduler.check()
    assert engine.stats().pages_used == 0


def test_nobody_waits_for_an_idle_engine():
    engine = link()
    with pytest.raises(EngineDeadError, match="idle"):
        engine.receive(None)


def test_a_session_lets_go_of_its_pages_on_an_idle_engine():
    """Seen: pages of a session whose time was up stayed taken until the next request."""
    now = 0.0
    engine = core(clock=lambda: now)
    local = LocalLink(engine, EngineInfo("fake", 60, VOCAB, 63, 4, 16, 1, "none", "none", []))
    params = SamplingParams(max_tokens=4, stop_token_ids=[])
    local.send(Submit(Request(id="a", prompt=list(range(20)), params=params, session="agent", hold=5.0)))
    while engine.busy:
        local.receive(0)
    assert engine.scheduler.memory.pool.used > 0
    now = 4.9
    local.receive(0)
    assert engine.scheduler.memory.pool.used > 0
    now = 5.1
    local.receive(0)
    assert engine.scheduler.memory.pool.used == 0


def test_an_answer_that_goes_on_finds_what_is_cached_of_it():
    """The cache may hold more than the prompt of it: what another request with the same beginning drew."""
    engine = core(prefix_cache=True)
    prompt = [1, 2, 3, 4, 5]
    whole = expected(prompt, 12)
    engine.submit(ask("first", prompt, max_tokens=12))
    while engine.busy:
        engine.step()
    engine.submit(replace(ask("second", prompt, max_tokens=12), outputs=whole[:9]))
    events = []
    while engine.busy:
        events += engine.step()
    assert [token for event in events for token in event.tokens] == whole[9:]
    assert events[0].counts.cached == 5 and events[0].index == 9
    assert engine.timelines("second")[0].prefix == "full"
    assert engine.stats().cached_tokens == 5


def test_a_branch_goes_on_alone_by_its_number():
    """Its noise is its own, wherever it is drawn."""
    engine = core()
    both = {0: expected([7, 8], 6), 2: expected([7, 8], 6, branch=2)}
    engine.submit(replace(ask("alone", [7, 8]), branch=2, outputs=both[2][:3]))
    drawn = []
    while engine.busy:
        drawn += [(event.branch, token) for event in engine.step() for token in event.tokens]
    assert drawn == [(2, token) for token in both[2][3:]] and both[0] != both[2]
    engine.submit(replace(ask("ended", [7, 8], n=2), branch=3))
    assert [event.branch for event in engine.abort("ended")] == [3, 4]
