"""Sequences with a KV budget: what they forget and when, and that nobody else is touched by it."""

import msgspec
import pytest
from test_scheduler_property import FULL, SHORT_OR_LONG, VOCAB, WINDOW, World, alone, layout

from quire.memory.compaction import compact
from quire.memory.manager import KVManager, PageTable
from quire.scheduling import Scheduler
from quire.scheduling.features.kv_eviction import EVICTION_POLICIES
from quire.types.config import SchedulerOptions
from quire.types.errors import ContextLengthError, InputError
from quire.types.fakes import FakeExecutor
from quire.types.kv import KVGroup
from quire.types.plan import Capacity
from quire.types.request import FinishReason, Request
from quire.types.sampling_params import EVICTION, SamplingParams
from quire.types.timeline import PrefixOutcome


def world(*groups, pages=100, depth=1, tokens=32, length=400, context=80, rope_shifts=True, **options):
    capacity = Capacity(
        pages=pages,
        slots=8,
        max_model_len=length,
        max_batch_tokens=tokens,
        depth=depth,
        context=context,
        rope_shifts=rope_shifts,
    )
    spec = layout(*(groups or (FULL,)))
    return Scheduler(SchedulerOptions(**options), spec, capacity), FakeExecutor(spec, capacity, vocab=VOCAB)


def ask(name, length, budget, eviction="sinks", **params):
    params = SamplingParams(**{"max_tokens": 8, "seed": 1, "kv_budget": budget, "kv_eviction": eviction} | params)
    return Request(id=name, prompt=[i % VOCAB for i in range(length)], params=params)


def run(scheduler, executor):
    """All plans, and the output tokens by request."""
    plans, out = [], {}
    while scheduler.busy:
        plan = scheduler.plan(0.0)
        plans.append(plan)
        for event in scheduler.commit(plan, executor.submit(plan).result()):
            out.setdefault(event.request, []).extend(event.tokens)
        scheduler.check()
    return plans, out


# ---- policies --------------------------------------------------------------------------------------------------


def test_what_each_policy_keeps():
    scores = [9.0, 1.0, 5.0, 7.0, 2.0, 3.0, 0.5, 0.1]
    assert EVICTION_POLICIES["sinks"].keep(scores, 6) == [0, 3, 4, 5, 6, 7]
    assert EVICTION_POLICIES["snapkv"].keep(scores, 6) == [0, 2, 3, 4, 5, 7]  # the latest, and the best of the others
    assert EVICTION_POLICIES["h2o"].keep(scores, 6) == [0, 2, 3, 5, 6, 7]  # half the latest, half the best
    assert set(EVICTION_POLICIES) == set(EVICTION)


# ---- pages -----------------------------------------------------------------------------------------------------


def test_shared_and_named_pages_are_turned_into_fresh_ones():
    memory = KVManager(layout(FULL), 20)
    table = PageTable(1)
    memory.extend(table, 0, 24)
    first = list(table.pages[0])
    memory.publish(table, 16, range(24), "")  # pages 0 .. 3 have names; 4 and 5 are the table's own
    other = memory.fork(table)
    memory.pool.release([other.pages[0].pop()])  # ... but 4 is somebody else's too
    change, dropped, read = compact(memory, table, [0, 2, 3, 4, 5])
    assert dropped == [first[1]] and sorted(read) == sorted(first[2:5])
    assert table.pages[0][0] == first[0] and table.pages[0][4] == first[5] and not set(table.pages[0][1:4]) & set(first)
    (rope_shift,) = change.rope_shifts
    assert rope_shift.by == -4 and len(rope_shift.sources) == 16
    assert [slot // 4 for slot in rope_shift.sources[::4]] == first[2:]
    assert [slot // 4 for slot in rope_shift.targets[::4]] == table.pages[0][1:]
    assert change.deltas == [(0, 1, table.pages[0][1:])]
    memory.publish(table, 20, range(24), "")
    assert all(memory.index.key_of(page) is None for page in table.pages[0][1:]), "names would lie"


def test_without_fresh_pages_names_are_given_up_but_never_others_pages():
    memory = KVManager(layout(FULL), 7)
    table = PageTable(1)
    memory.extend(table, 0, 24)
    pages = list(table.pages[0])
    memory.publish(table, 24, range(24), "")
    _, dropped, read = compact(memory, table, [0, 3, 4, 5])
    assert table.pages[0] == [pages[0], *pages[3:]] and not read and memory.index.key_of(pages[3]) is None
    memory.give_back(dropped, 4)
    other = memory.fork(table)
    assert memory.pool.take(memory.pool.available) is not None
    before = list(table.pages[0])
    assert compact(memory, table, [0, 2, 3]) is None and table.pages[0] == before
    assert other.pages[0] == before


# ---- the way of a sequence -------------------------------------------------------------------------------------


def test_sinks_hold_the_budget_from_the_first_token():
    scheduler, executor = world()
    scheduler.submit(ask("a", 200, 32))
    plans, out = run(scheduler, executor)
    rows = [r for p in plans for r in p.rows]
    assert max(r.start - r.shift + r.count for r in rows) == 32
    assert [(r.start, r.count, r.shift) for r in rows[:4]] == [(0, 32, 0), (32, 8, 8), (40, 8, 16), (48, 8, 24)]
    assert scheduler.memory.pool.peak <= 8 + 6, "eight pages, and what a rope_shift copies"
    assert not any(r.mass for r in rows)
    assert out["a"] == alone(ask("a", 200, 32, max_tokens=8, stop_token_ids=[]), 0)[0][:8] or len(out["a"]) == 8
    assert scheduler.stats.evicted_tokens == rows[-1].shift == scheduler.timelines("a")[0].evicted


@pytest.mark.parametrize("eviction", ["snapkv", "h2o"])
def test_attention_policies_see_the_whole_prompt_first(eviction):
    scheduler, executor = world()
    scheduler.submit(ask("a", 70, 32, eviction))
    plans, _ = run(scheduler, executor)
    rows = [r for p in plans for r in p.rows]
    prompt = [r for r in rows if r.start < 70]
    assert all(r.shift == 0 for r in prompt)
    if eviction == "snapkv":
        assert [(r.start, r.mass) for r in prompt] == [(0, False), (32, False), (62, True)], "the last 8 decide"
    else:
        assert all(r.mass for r in rows)
    assert rows[len(prompt)].shift == 48, "18 pages became 6"


@pytest.mark.parametrize("eviction", ["snapkv", "h2o"])
@pytest.mark.parametrize("scored", [False, True])
def test_longer_prompts_than_the_model_attends_to_are_forgotten_on_the_way(eviction, scored):
    length = 60 if scored else 150
    scheduler, executor = world()
    scheduler.submit(ask("a", length, 40, eviction, prompt_logprobs=0 if scored else None))
    plans, _ = run(scheduler, executor)
    rows = [r for p in plans for r in p.rows]
    assert max(r.start - r.shift + r.count for r in rows) <= 40
    asked = [r.start - r.shift for r in rows if r.mass]
    assert asked and (eviction == "h2o" or min(asked) == 32)


def test_branches_inherit_what_is_left():
    scheduler, executor = world(depth=2)
    scheduler.submit(ask("a", 90, 32, n=3, max_tokens=20, ignore_eos=True))
    plans, _ = run(scheduler, executor)
    last = plans[-1].rows
    assert len(last) == 3 and len({r.shift for r in last}) == 1 and last[0].shift >= 72
    assert scheduler.memory.pool.used == 0


def test_a_prefix_is_shared_up_to_where_forgetting_begins():
    scheduler, executor = world()
    for name in ("a", "b"):
        scheduler.submit(ask(name, 100, 32))
        run(scheduler, executor)
    (log,) = scheduler.timelines("b")
    assert log.cached == 28 and log.prefix is PrefixOutcome.BUDGET
    scheduler.submit(ask("c", 60, None))
    run(scheduler, executor)
    assert scheduler.timelines("c")[0].cached == 32, "what was computed after is nobody's prefix"
    scheduler.submit(ask("d", 60, 32, "h2o"))
    run(scheduler, executor)
    assert scheduler.timelines("d")[0].prefix is PrefixOutcome.SCORED


def test_refusals():
    scheduler, _ = world()
    with pytest.raises(InputError, match=r"from 16 .4 pages. to 80"):
        scheduler.submit(ask("a", 10, 12))
    with pytest.raises(InputError, match="to 80 tokens"):
        scheduler.submit(ask("a", 10, 96))
    with pytest.raises(ContextLengthError, match=r"holds 80.*kv_budget"):
        scheduler.submit(ask("a", 100, None))
    with pytest.raises(ContextLengthError, match=r"holds 400.*max_model_len"):
        scheduler.submit(ask("a", 400, 32))
    with pytest.raises(InputError, match="sinks, snapkv, h2o"):
        SamplingParams(kv_budget=64, kv_eviction="lru")
    for refused, why in (
        (world(FULL, WINDOW), "windows"), (world(WINDOW), "windows"), (world(rope_shifts=False), "positions"),
        (world(scheduler="static"), "static"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=why):
            refused[0].submit(ask("a", 10, 32))
    assert not scheduler.busy


def test_a_budget_is_what_admission_counts():
    """Eight such streams fit at once, though each is longer than all memory."""
    scheduler, executor = world(pages=8 * 8 + 9, tokens=512)
    for i in range(8):
        scheduler.submit(ask(f"r{i}", 300, 32, max_tokens=4))
    plans, out = run(scheduler, executor)
    assert max(len(p.rows) for p in plans) == 8 and len(out) == 8 and scheduler.stats.preemptions == 0


# ---- random life -----------------------------------------------------------------------------------------------


class Forgetful(World):
    """Most requests have a budget. What was forgotten before a token must be the same however often it is computed."""

    def __init__(self, **options):
        super().__init__((FULL,), policy="fcfs", **options)
        capacity = msgspec.structs.replace(self.scheduler.capacity, rope_shifts=True, context=60)
        self.scheduler = Scheduler(SchedulerOptions(), layout(FULL), capacity)
        self.executor = FakeExecutor(layout(FULL), capacity, vocab=VOCAB)
        self.forgotten = {}
        self.same = 0

    def submit(self):
        count = len(self.requests)
        plain = self.scheduler.submit
        self.scheduler.submit = lambda request: None
        super().submit()
        self.scheduler.submit = plain
        name = f"r{count}"
        request = self.requests[name]
        if request.beam is None and not request.pooling and self.rng.random() < 0.8:
            budget, eviction = self.rng.randint(16, 40), self.rng.choice(EVICTION)
            params = msgspec.structs.replace(request.params, kv_budget=budget, kv_eviction=eviction)
            request = self.requests[name] = msgspec.structs.replace(request, params=params)
        elif len(request.prompt) + (request.params.max_tokens or 0) > 60:
            del self.requests[name]
            return
        self.scheduler.submit(request)

    def step(self):
        submit = self.executor.submit

        def watched(plan):
            ticket = submit(plan)
            for row in plan.rows:
                slot = self.executor._slots[row.slot]
                for index in range(row.start, row.start + row.count):
                    place = index - row.shift
                    entry = self.executor._kv[slot.tables[0][place // 4], place % 4]
                    key = (slot.admit.key, slot.digest(index))
                    self.same += key in self.forgotten and entry[2] > 0
                    assert self.forgotten.setdefault(key, entry[2]) == entry[2], "forgot something else this time"
            return ticket

        self.executor.submit = watched
        super().step()
        self.executor.submit = submit


@SHORT_OR_LONG
@pytest.mark.parametrize(("depth", "seed"), [(1, 11), (2, 11), (3, 11)])
def test_random_life_with_budgets(depth, seed, operations):
    world = Forgetful(depth=depth, seed=seed)
    actions = [world.submit] * 4 + [world.step] * 30 + [world.abort, world.stop_string, world.preempt]
    for _ in range(operations):
        world.rng.choice(actions)()
        world.scheduler.check()
    world.drain()
    world.scheduler.check()
    assert world.scheduler.memory.pool.used == 0 and not world.scheduler.features.eviction.returning
    for (name, branch), reason in world.ended.items():
        request = world.requests[name]
        if request.beam is None and not request.pooling:
            expected, _ = alone(request, branch)
            out = world.outputs[name, branch]
            assert out == expected[: len(out)]
            assert reason is not FinishReason.LENGTH or out == expected
    stats = world.scheduler.stats
    assert stats.evicted_tokens > operations and stats.preemptions > 20
    assert stats.cached_tokens > 200 and world.same > 100


def test_a_page_of_one_token():
    """No page is partly filled, and the window is wider than the budget."""
    scheduler, executor = world(KVGroup(layers=(0,), tokens_per_page=1, kv_heads=1, head_dim=1))
    scheduler.submit(ask("a", 90, 7, "snapkv"))
    plans, _ = run(scheduler, executor)
    assert max(r.start - r.shift + r.count for p in plans for r in p.rows) == 7


def test_what_an_eviction_has_yet_to_read_nobody_changes():
    """Branches share pages; the first evicts and finds no page to go on with, the second would shift them in place."""
    scheduler, executor = world(pages=20, tokens=3)
    for i in range(2):
        prompt = [(7 * i + j) % VOCAB for j in range(9)]
        scheduler.submit(Request(id=f"other{i}", prompt=prompt, params=SamplingParams(max_tokens=40, seed=i)))
    scheduler.submit(ask("a", 30, 24, n=2, max_tokens=24, temperature=0.0))
    _, out = run(scheduler, executor)  # the executor knows what each page holds
    assert len(out["a"]) == 48


@pytest.mark.parametrize("pages", range(27, 42))
@pytest.mark.parametrize("depth", [1, 2])
def test_a_budget_that_takes_most_of_the_memory_gets_on(pages, depth):
    """What an eviction lets go while a step is in flight comes back when that ends, although the plan came to nothing:
    the sequence is not to lose all its pages for want of these, again and again."""
    scheduler, executor = world(pages=pages, depth=depth, tokens=24, context=400)
    scheduler.submit(ask("a", 130, 100), 0.0)
    in_flight, drawn = [], 0
    for _ in range(200):
        if (plan := scheduler.plan(0.0)) is not None:
            in_flight.append((plan, executor.submit(plan)))
        if in_flight and (plan is None or len(in_flight) >= depth):
            plan, ticket = in_flight.pop(0)
            drawn += sum(len(event.tokens) for event in scheduler.commit(plan, ticket.result()))
        scheduler.check()
        if not scheduler.busy:
            break
    assert drawn == 8
    assert scheduler.memory.pool.used == 0
