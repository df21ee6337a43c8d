"""Prefix hits to the token: pages found by the tokens they hold, copied by who goes on from within them."""

from random import Random

import pytest

from quire.memory import KVManager, PageTable
from quire.memory.partial_pages import PartialPages, pack
from quire.scheduling import Scheduler
from quire.types.config import SchedulerOptions
from quire.types.fakes import FakeExecutor, fake_token
from quire.types.kv import KVGroup, KVLayout, StateGroup, StateShape
from quire.types.plan import Capacity
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams
from quire.types.timeline import PrefixOutcome

ROOT = (0, b"root")
STATE = StateGroup(layers=(2,), shape=StateShape((3, 10)))


def layout(*groups, size=16, states=()):
    """`groups`: (tokens a page, window)."""
    found = tuple(
        KVGroup(layers=(i,), tokens_per_page=tokens, kv_heads=1, head_dim=1, window=window)
        for i, (tokens, window) in enumerate(groups or ((size, None),))
    )
    return KVLayout(groups=found, dtype="float32", states=states)


def shared(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_the_longest_beginning_is_found_among_many_as_by_comparing_all():
    rng = Random(3)
    for _ in range(200):
        partial, held = PartialPages(), {}
        for page in range(1, rng.randrange(2, 40)):
            tokens = [rng.randrange(3) << rng.choice([0, 8, 30]) for _ in range(rng.randint(1, 6))]
            if rng.random() < 0.2 and held:
                gone = rng.choice(list(held))
                partial.remove(gone)
                del held[gone]
            partial.enter([(page, ROOT, pack(tokens))])
            held[page] = tokens
        wanted = [rng.randrange(3) << rng.choice([0, 8, 30]) for _ in range(6)]
        best = max((shared(wanted, tokens) for tokens in held.values()), default=0)
        assert partial.match(ROOT, pack(wanted)) == (0, 0) and partial.planned(ROOT, pack(wanted)) == best
        partial.settle()
        length, page = partial.match(ROOT, pack(wanted))
        assert length == best and (not best or shared(wanted, held[page]) == best)
        assert (
            partial.match((0, b"other"), pack(wanted)) == (0, 0) and partial.match((1, b"root"), pack(wanted))[0] == 0
        )
        partial.check()


def test_pages_of_many_plans_behind_one_stay_in_order_however_many_each_plan_adds():
    rng, partial, held = Random(4), PartialPages(), {}
    for plan in range(60):
        for _ in range(rng.choice([1, 2, 40])):
            page = len(held) + 1
            held[page] = [rng.randrange(5) for _ in range(4)]
            partial.enter([(page, ROOT, pack(held[page]))])
        partial.settle()
        partial.check()
        if plan % 3 == 0:
            gone = rng.choice(list(held))
            partial.remove(gone)
            held[gone] = [9]  # found by nobody
    for _ in range(50):
        wanted = [rng.randrange(5) for _ in range(4)]
        length, page = partial.match(ROOT, pack(wanted))
        assert length == max(shared(wanted, tokens) for tokens in held.values()) == shared(wanted, held[page])


class Engine:
    def __init__(self, found, *, pages=4096, slots=128, depth=1, batch=4096, **options):
        capacity = Capacity(
            pages=pages, slots=slots, max_model_len=2048, max_batch_tokens=batch, depth=depth, states=1 + 3 * slots
        )
        self.scheduler = Scheduler(SchedulerOptions(scheduler="fcfs"), found, capacity, **options)
        self.executor = FakeExecutor(found, capacity)
        self.cached, self.copies, self.out, self.now = {}, 0, {}, 0.0

    def submit(self, name, prompt, most=4, salt="", n=1):
        params = SamplingParams(max_tokens=most, seed=1, n=n)
        self.scheduler.submit(Request(id=name, prompt=prompt, params=params, arrival=self.now, salt=salt))

    def step(self):
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return
        self.copies += len(plan.copies)
        for event in self.scheduler.commit(plan, self.executor.submit(plan).result(), self.now):
            self.out.setdefault((event.request, event.branch), []).extend(event.tokens)
            if event.counts is not None:
                self.cached[event.request] = event.counts.cached
        self.scheduler.check()

    def drain(self):
        while self.scheduler.busy:
            self.step()

    def ask(self, name, prompt, **more):
        self.submit(name, prompt, **more)
        self.drain()
        return self.cached[name]


def alone(prompt, most, branch=0):
    tokens = list(prompt)
    for _ in range(most):
        tokens.append(fake_token(tokens, 1, branch, 97))
    return tokens[len(prompt) :]


SHARED = [7 + i % 89 for i in range(505)]


@pytest.mark.parametrize("suffix", [3, 20])  # the shared part ends within a page that is filled in part, or full
@pytest.mark.parametrize("together", [False, True])
def test_64_requests_that_share_505_tokens_hit_505(suffix, together):
    engine = Engine(layout())
    prompts = [[*SHARED, 100 + i, *[i] * (suffix - 1)] for i in range(65)]
    engine.submit("0", prompts[0], most=30)
    if not together:
        engine.step()  # the first goes on while the others come
    for i in range(1, 65):
        engine.submit(str(i), prompts[i])
    engine.drain()
    assert sorted(engine.cached[str(i)] for i in range(65)) == [0] + [505] * 64
    assert engine.scheduler.stats.cached_tokens == 64 * 505 and engine.copies == 64
    assert all(engine.out[str(i), 0] == alone(prompts[i], 4 if i else 30) for i in range(65))
    log = engine.scheduler.timelines("5")[0]
    assert log.prefix is (PrefixOutcome.FULL if suffix == 3 else PrefixOutcome.NEW) and log.paged == 505


def test_a_few_that_share_a_part_of_a_page_do_not_wait_a_step_for_it():
    engine = Engine(layout())
    for i in range(3):
        engine.submit(str(i), [*SHARED, 100 + i, *[i] * 9])
    engine.step()
    assert set(engine.out) == {("0", 0), ("1", 0), ("2", 0)}
    assert [engine.cached[str(i)] for i in range(3)] == [0, 496, 496]


def test_the_next_turn_goes_on_in_the_page_that_the_answer_ended_in():
    engine = Engine(layout())
    prompt = list(range(1, 21))
    engine.ask("first", prompt, most=9)
    again = [*prompt, *engine.out["first", 0], 5, 6, 7]
    assert engine.ask("second", again, most=4) == 28, "all but the last drawn token, whose KV nobody computed"
    assert engine.copies == 0, "nobody else holds the page, and it ends where the hit does"
    assert engine.ask("other", [*again[:25], 1, 2, 3]) == 25 and engine.copies == 1
    assert engine.out["second", 0] == alone(again, 4)


def test_a_prompt_asked_again_computes_its_last_token_only():
    engine = Engine(layout())
    for length in (1, 2, 15, 16, 17, 31, 32, 33):
        prompt = [1000 + length, *range(length - 1)]
        engine.ask(f"first{length}", prompt)
        assert engine.ask(f"again{length}", prompt) == length - 1


def test_salts_share_no_part_of_a_page():
    engine = Engine(layout())
    engine.ask("a", list(range(40)), salt="a")
    assert engine.ask("b", list(range(40)), salt="b") == 0 and engine.ask("c", list(range(7)), salt="b") == 6


def test_windows_and_pages_of_two_sizes():
    engine = Engine(layout((4, None), (8, 11)))
    prompt = list(range(1, 60))
    engine.ask("first", prompt)
    for length in (1, 3, 4, 7, 8, 21, 50, 57):
        assert engine.ask(f"at {length}", [*prompt[:length], 90, 91]) == length


def test_recurrent_layers_keep_to_their_snapshots():
    engine = Engine(layout((4, None), states=(STATE,)))
    engine.ask("first", list(range(1, 31)))
    assert engine.ask("second", [*range(1, 28), 90, 91]) % 4 == 0 and engine.copies == 0


def test_without_a_prefix_cache_nothing_is_matched():
    engine = Engine(layout(), prefix_cache=False)
    engine.ask("first", SHARED)
    assert engine.ask("second", SHARED) == 0 and engine.scheduler.memory.pool.cached == 0


def test_a_copy_that_would_not_fit_beside_its_source_is_not_made():
    engine = Engine(layout(size=4), pages=1 + 6)
    engine.ask("first", list(range(1, 22)), most=2)
    prompt = [*range(1, 20), 90, 91, 92]  # with its answer, six pages: all there are
    assert engine.ask("second", prompt, most=2) == 16
    assert engine.out["second", 0] == alone(prompt, 2)


def test_dropping_a_prompt_drops_the_page_it_ends_in():
    memory = KVManager(layout(size=4), 32)
    for tokens in ([1, 2], [1, 2, 3, 4, 5, 6]):
        table = PageTable(1)
        memory.hash_pages(table, tokens, "")
        memory.adopt(table, memory.lookup(table, len(tokens), tokens))
        memory.extend(table, 0, len(tokens))
        memory.publish_tail(table, len(tokens), tokens, "")
        memory.release(table, len(tokens))
        memory.plan_begins()
        assert memory.lookup(table, len(tokens) + 1, tokens).tokens == len(tokens)
        keys = [*enumerate(table.roots), *((0, name) for name in table.hashes[0])]
        assert memory.drop_cached(keys) and memory.pool.cached == 0
        assert memory.lookup(table, len(tokens) + 1, tokens).tokens == 0


@pytest.mark.parametrize("groups", [((4, None),), ((4, None), (8, 11)), ((4, 9),)], ids=["full", "two", "window"])
@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_leaks_and_nobody_reads_what_is_not_theirs(groups, depth):
    """Random prompts over few tokens part within pages all the time; pages are short. The fake executor checks that
    every row sees its own history, `check` that every reference is held by somebody."""
    rng = Random(depth)
    engine = Engine(layout(*groups), pages=48, slots=6, batch=24, depth=depth)
    prompts, flight = {}, []
    for turn in range(700):
        if rng.random() < 0.3 and len(engine.scheduler.sequences.requests) < 12:
            known = list(rng.choice([*prompts.values(), ([], 1, "")])[0])
            prompt = known[: rng.randint(0, len(known))] + [rng.randrange(3) for _ in range(rng.randint(1, 9))]
            name, most, salt = str(turn), rng.randint(1, 12), rng.choice(["", "", "tenant"])
            prompts[name] = prompt[:60], most, salt
            engine.submit(name, prompt[:60], most=most, salt=salt, n=rng.choice([1, 1, 3]))
        if rng.random() < 0.03 and engine.scheduler.sequences.running:
            engine.scheduler.sequences.preempt(rng.choice(list(engine.scheduler.sequences.running)))
        engine.now += 1.0
        plan = engine.scheduler.plan(engine.now)
        if plan is not None:
            engine.copies += len(plan.copies)
            flight.append((plan, engine.executor.submit(plan)))
        if flight and (plan is None or len(flight) >= depth):
            plan, ticket = flight.pop(0)
            for event in engine.scheduler.commit(plan, ticket.result(), engine.now):
                engine.out.setdefault((event.request, event.branch), []).extend(event.tokens)
                if event.counts is not None:
                    engine.cached[event.request] = event.counts.cached
        engine.scheduler.check()
    while flight:
        plan, ticket = flight.pop(0)
        engine.scheduler.commit(plan, ticket.result(), engine.now)
    engine.drain()
    assert engine.scheduler.memory.pool.used == 0 and not engine.scheduler.memory.returning
    ends_within = sum(cached % 4 != 0 for cached in engine.cached.values())
    assert engine.copies > 50 and ends_within > 50
    for (name, branch), tokens in list(engine.out.items())[:-12]:
        prompt, most, _ = prompts[name]
        assert tokens == alone(prompt, most, branch)[: len(tokens)] and tokens
