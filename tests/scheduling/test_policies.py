"""The contract of scheduling policies, over all of them and over some that are written here; features that listen."""

import itertools
import random
from collections import Counter

import pytest
from test_scheduler_property import FULL, VOCAB, World, layout

from quire import LLM, SamplingParams
from quire.engine.core import EngineCore
from quire.scheduling import POLICIES, Scheduler, SchedulingFeature
from quire.scheduling import admission as admission_module
from quire.types.beam import BeamParams
from quire.types.config import EngineOptions, SchedulerOptions
from quire.types.errors import ConfigError, InputError
from quire.types.fakes import FakeExecutor
from quire.types.plan import Capacity
from quire.types.request import FinishReason, Request
from quire.types.sampling_params import SamplingParams as Params

OWN = ["own_policies:LongestPromptFirst", "own_policies:LeastServedTenantFirst"]
EVERY = pytest.mark.parametrize("policy", [*POLICIES, *OWN])


def engine(policy, *, slots=4, pages=60, tokens=24, length=90, listeners=(), **options):
    capacity = Capacity(pages=pages, slots=slots, max_model_len=length, max_batch_tokens=tokens, depth=1)
    scheduler = Scheduler(SchedulerOptions(scheduler=policy, **options), layout(FULL), capacity, listeners=listeners)
    return scheduler, FakeExecutor(layout(FULL), capacity, vocab=VOCAB)


def ask(name, prompt, *, tokens=8, arrival=0.0, **more):
    params = Params(max_tokens=tokens, seed=0)
    return Request(id=name, prompt=prompt, params=params, arrival=arrival, **more)


def step(scheduler, executor, now):
    plan = scheduler.plan(now)
    if plan is None:
        return None, []
    events = scheduler.commit(plan, executor.submit(plan).result(), now + 0.05)
    scheduler.check()
    return plan, events


class Admitted(SchedulingFeature):
    """In which order requests are admitted."""

    def __init__(self):
        self.order = []

    def admitted(self, seq, hit):
        self.order.append(seq.request.id)


def workload(policy, seed, count=60):
    """Requests of two tenants that arrive over time, more than fit at once."""
    rng, now = random.Random(seed), 0.0
    uses_priority = policy == "priority"
    for i in range(count):
        now += rng.random() * 0.2
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([3, 9, 40]))]
        tenant, priority = rng.choice("ab"), rng.randrange(3) * uses_priority
        yield ask(f"r{i}", prompt, tokens=rng.randint(1, 20), arrival=now, tenant=tenant, priority=priority)


def serve(policy, seed):
    """Every plan of a workload, as text; every end, and when it came."""
    scheduler, executor = engine(policy)
    waiting, plans, ends, now = list(workload(policy, seed)), [], {}, 0.0
    for _ in range(5000):
        now += 0.1
        while waiting and waiting[0].arrival <= now:
            scheduler.submit(waiting.pop(0))
        plan, events = step(scheduler, executor, now)
        plans.append(repr(plan))
        ends |= {event.request: (event.finish, now) for event in events if event.finish}
        fits = scheduler.sequences.slots and scheduler.memory.pool.available > 30
        assert plan is not None or not (scheduler.sequences.waiting and fits), "idle beside work that fits"
        if not waiting and not scheduler.busy:
            return plans, ends
    raise AssertionError("requests starve")


@EVERY
def test_everything_is_served_and_a_replay_decides_alike(policy):
    plans, ends = serve(policy, 3)
    assert len(ends) == 60 and {reason for reason, _ in ends.values()} == {FinishReason.LENGTH}
    assert serve(policy, 3) == (plans, ends)


@EVERY
def test_keys_are_a_total_order_that_does_not_depend_on_who_is_asked_first(policy):
    scheduler, _ = engine(policy)
    for request in workload(policy, 5, 20):
        scheduler.submit(request)
    queued = scheduler.sequences.waiting.first(100)
    assert len(queued) == 20 and len({seq.rank for seq in queued}) == 20
    assert queued == sorted(queued, key=lambda seq: seq.rank)
    for one, two in itertools.pairwise(queued):
        assert scheduler.policy.key(one.view) <= scheduler.policy.key(two.view)


def test_own_policy_decides_who_starts_and_who_is_displaced():
    scheduler, executor = engine("own_policies:LongestPromptFirst", slots=2)
    for name, length in (("short", 4), ("shorter", 3), ("middle", 6)):
        scheduler.submit(ask(name, list(range(length)), tokens=30))
    step(scheduler, executor, 0.1)
    assert [seq.request.id for seq in scheduler.sequences.running] == ["middle", "short"]
    scheduler.submit(ask("long", list(range(20)), tokens=30))
    step(scheduler, executor, 0.2)
    assert {seq.request.id for seq in scheduler.sequences.running} == {"middle", "long"}
    assert scheduler.stats.preemptions == 1
    scheduler.submit(ask("equal", list(range(11)), tokens=30))  # not twice as long as the middle one's six
    step(scheduler, executor, 0.3)
    assert scheduler.stats.preemptions == 1


def test_one_that_waited_for_pages_of_another_displaces_too():
    scheduler, executor = engine("own_policies:LongestPromptFirst", slots=3, prefill_chunk=4)
    stem = list(range(20))
    scheduler.submit(ask("short", [90, 91], tokens=80))
    step(scheduler, executor, 0.1)
    scheduler.submit(ask("first", [*stem, *range(30, 50)], tokens=40))
    scheduler.submit(ask("second", [*stem, 60], tokens=9))  # waits for the pages that the first one computes
    step(scheduler, executor, 0.2)
    scheduler.submit(ask("last", list(range(50, 75)), tokens=40))
    for i in range(8):
        step(scheduler, executor, 0.3 + i)
    assert {seq.request.id for seq in scheduler.sequences.running} == {"first", "second", "last"}


def test_nothing_is_displaced_that_would_not_let_the_candidate_in():
    scheduler, executor = engine("own_policies:LongestPromptFirst", slots=5, pages=31)
    scheduler.submit(ask("holder", list(range(60)), tokens=29))
    for i in range(3):
        scheduler.submit(ask(f"small{i}", [90, i], tokens=12))
    while len(scheduler.sequences.running) < 4:
        step(scheduler, executor, 0.1)
    scheduler.submit(ask("large", list(range(7, 80)), tokens=8))  # it needs the pages of the holder, who stays
    for i in range(5):
        step(scheduler, executor, 1.0 + i)
    assert scheduler.stats.preemptions == 0 and len(scheduler.sequences.running) == 4


@pytest.mark.parametrize("depth", [1, 2])
def test_the_displaced_come_back_after_the_one_they_made_way_for(depth):
    admitted = Admitted()
    scheduler, executor = engine("own_policies:LongPromptsDisplace", slots=1, listeners=[admitted])
    spare, in_flight = scheduler.features.preemption.spare, []
    scheduler.submit(ask("short", [1, 2], tokens=40))
    for i in range(12):
        if (plan := scheduler.plan(1.0 + i)) is not None:
            in_flight.append((plan, executor.submit(plan)))
        if in_flight and (plan is None or len(in_flight) == depth):
            done, ticket = in_flight.pop(0)
            scheduler.commit(done, ticket.result(), 1.5 + i)
        if i == 3:
            scheduler.submit(ask("long", [1, 2, 3], tokens=3, arrival=4.0))
    assert admitted.order == ["short", "long", "short"] and scheduler.stats.preemptions == 1
    assert scheduler.features.preemption.spare == spare, "nobody was short of pages"


def test_chunks_computed_apart_go_before_others_of_their_age_though_keys_change():
    scheduler, executor = engine("own_policies:LeastServedTenantFirst", slots=1)
    scheduler.submit(ask("runs", [9, 9], tenant="a"))
    step(scheduler, executor, 0.1)
    scheduler.submit(ask("waits", [1, 2], tenant="a"))
    apart = scheduler.sequences.enter_apart(ask("apart", [3, 4], tenant="a"))
    for i in range(3):
        assert scheduler.sequences.waiting.first(1) == [apart]
        step(scheduler, executor, 1.0 + i)


def test_keys_that_change_move_sequences_in_the_queue():
    scheduler, executor = engine("own_policies:LeastServedTenantFirst", slots=1)
    for i in range(4):
        scheduler.submit(ask(f"busy{i}", [1, 2, 3, i], tokens=4, tenant="busy", arrival=float(i)))
    step(scheduler, executor, 9.0)
    scheduler.submit(ask("late", [5, 6, 7], tokens=4, tenant="quiet", arrival=9.0))
    order = []
    for i in range(40):
        order += [event.request for event in step(scheduler, executor, 10.0 + i)[1] if event.finish]
    assert order == ["busy0", "late", "busy1", "busy2", "busy3"]


def test_own_policy_through_the_public_option(default_model):
    with LLM("smollm2-135m", kv_memory="64M", scheduler="own_policies:LongestPromptFirst", max_seqs=1) as llm:
        prompts = ["Hi", "A much longer prompt than the other one, by many words indeed"]
        results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4))
        first, second = (result.times.first_token for result in results)
        assert second < first


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lifo", "scheduler must be one of fcfs, priority, sjf"),
        ("nowhere:Policy", "cannot be imported"),
        ("own_policies:Nothing", "cannot be imported"),
        ("random:Random", "not a subclass"),
    ],
)
def test_policies_that_are_not_there(name, message):
    with pytest.raises(ConfigError, match=message):
        engine(name)


def test_a_feature_of_its_own_listens():
    class PreemptionsByTenant(SchedulingFeature):
        def __init__(self):
            self.counts = Counter()

        def preempted(self, seq):
            self.counts[seq.request.tenant] += 1

    listener = PreemptionsByTenant()
    capacity = Capacity(pages=14, slots=4, max_model_len=60, max_batch_tokens=16, depth=2)
    core = EngineCore(EngineOptions(), FakeExecutor(layout(FULL), capacity, vocab=VOCAB), listeners=[listener])
    for i in range(6):
        core.submit(ask(f"r{i}", [i, 1, 2, 3], tokens=20, tenant="ab"[i % 2], arrival=float(i)))
    while core.busy:
        core.step()
    assert sum(listener.counts.values()) == core.stats().preemptions > 0 and set(listener.counts) <= {"a", "b"}


def test_a_request_that_does_not_fit_is_overtaken_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(admission_module, "MAX_OVERTAKEN", 3)
    admitted = Admitted()
    scheduler, executor = engine("fcfs", slots=8, pages=31, listeners=[admitted])
    scheduler.submit(ask("holder", list(range(60)), tokens=29, arrival=0.0))
    step(scheduler, executor, 0.1)
    while scheduler.sequences.running and next(iter(scheduler.sequences.running)).computed < 60:
        step(scheduler, executor, 0.2)
    scheduler.submit(ask("large", list(range(7, 80)), tokens=8, arrival=1.0))
    for i in range(8):
        scheduler.submit(ask(f"small{i}", [90, i], tokens=1, arrival=2.0 + i))
    for i in range(60):
        step(scheduler, executor, 3.0 + i)
    assert admitted.order == ["holder", "small0", "small1", "small2", "large", *(f"small{i}" for i in range(3, 8))]


def test_the_bound_holds_for_all_that_are_overtaken(monkeypatch):
    monkeypatch.setattr(admission_module, "MAX_OVERTAKEN", 3)
    admitted = Admitted()
    scheduler, executor = engine("fcfs", slots=8, pages=31, listeners=[admitted])
    scheduler.submit(ask("holder", list(range(60)), tokens=29))
    while not scheduler.sequences.running or next(iter(scheduler.sequences.running)).computed < 60:
        step(scheduler, executor, 0.1)
    for i in range(2):
        scheduler.submit(ask(f"large{i}", list(range(7 + i, 80)), tokens=8, arrival=1.0 + i))
    for i in range(8):
        scheduler.submit(ask(f"small{i}", [90, i], tokens=1, arrival=3.0 + i))
    for i in range(90):
        step(scheduler, executor, 3.0 + i)
    small = [f"small{i}" for i in range(8)]
    assert admitted.order == ["holder", *small[:3], "large0", "large1", *small[3:]]


def test_one_that_was_preempted_too_often_is_overtaken_up_to_the_bound(monkeypatch):
    monkeypatch.setattr(admission_module, "MAX_OVERTAKEN", 3)
    admitted, free = Admitted(), set()
    scheduler, executor = engine("fcfs", listeners=[admitted])
    monkeypatch.setattr(
        scheduler.features.preemption, "admits", lambda seq: seq.request.id != "often" or "often" in free
    )
    scheduler.submit(ask("often", [1, 2, 3]))
    for i in range(8):
        scheduler.submit(ask(f"other{i}", [90, i], tokens=1, arrival=1.0 + i))
    for i in range(9):
        step(scheduler, executor, 9.0 + i)
    assert admitted.order == ["other0", "other1", "other2"]
    free.add("often")
    step(scheduler, executor, 20.0)
    assert admitted.order[3] == "often"


def test_priority_does_not_let_lesser_requests_pass():
    admitted = Admitted()
    scheduler, executor = engine("priority", slots=8, pages=31, listeners=[admitted])
    scheduler.submit(ask("holder", list(range(60)), tokens=29))
    while not scheduler.sequences.running or next(iter(scheduler.sequences.running)).computed < 60:
        step(scheduler, executor, 0.1)
    scheduler.submit(ask("large", list(range(7, 80)), tokens=2, priority=0))
    scheduler.submit(ask("lesser", [90, 1], tokens=1, priority=1))
    scheduler.submit(ask("equal", [91, 2], tokens=1, priority=0))
    for i in range(60):
        step(scheduler, executor, 1.0 + i)
    assert admitted.order == ["holder", "equal", "large", "lesser"]


@pytest.mark.parametrize("searches", [2, 3, 4])
@pytest.mark.parametrize("policy", [*OWN, "own_policies:LeastServedFirst"])
def test_searches_in_each_others_way_end_though_their_keys_change(policy, searches):
    scheduler, executor = engine(policy, slots=5)
    beam = BeamParams(beams=4, n=2, max_tokens=12)
    params = Params(n=2, temperature=0.0, max_tokens=12, logprobs=beam.candidates(0))
    for i in range(searches):
        scheduler.submit(Request(id=f"r{i}", prompt=[i, 7, 8], params=params, beam=beam, arrival=float(i)))
    ended = [event.request for i in range(200) for event in step(scheduler, executor, 1.0 + i)[1] if event.finish]
    assert Counter(ended) == {f"r{i}": 2 for i in range(searches)}


def test_searches_in_each_others_way_wait_for_pages_that_a_tier_delivers(monkeypatch):
    class Loads(SchedulingFeature):
        """Beams that were preempted come back from a tier, which takes some plans."""

        left = 0

        def preempted(self, seq):
            self.left = 5

        def holds(self, seq, builder):
            return self.left > 0

        def contribute(self, builder):
            self.left -= 1

    loads = Loads()
    scheduler, executor = engine("fcfs", slots=5, listeners=[loads])
    monkeypatch.setattr(type(scheduler.features.tiers), "moving", property(lambda tiers: loads.left > 0))
    beam = BeamParams(beams=4, n=1, max_tokens=12)
    params = Params(n=1, temperature=0.0, max_tokens=12, logprobs=beam.candidates(0))
    for i in range(3):
        scheduler.submit(Request(id=f"r{i}", prompt=[i, 7, 8], params=params, beam=beam, arrival=float(i)))
    most = 0
    for i in range(400):
        before = scheduler.stats.preemptions
        step(scheduler, executor, 1.0 + i)
        most = max(most, scheduler.stats.preemptions - before)
    assert not scheduler.busy and most == 1


def test_forked_beams_are_told_of_like_any_other_sequence():
    class Lives(SchedulingFeature):
        def __init__(self):
            self.arrivals, self.admissions, self.planned = Counter(), Counter(), set()

        def arrived(self, seq):
            self.arrivals[seq.id] += 1

        def admitted(self, seq, hit):
            self.admissions[seq.id] += 1

        def step_planned(self, step):
            self.planned.update(seq.id for seq, _ in step.rows)

    lives = Lives()
    scheduler, executor = engine("own_policies:Counting", listeners=[lives])
    beam = BeamParams(beams=4, n=1, max_tokens=6)
    params = Params(n=1, temperature=0.0, max_tokens=6, logprobs=beam.candidates(0))
    scheduler.submit(Request(id="r", prompt=[5, 7, 8], params=params, beam=beam))
    for i in range(20):
        step(scheduler, executor, 1.0 + i)
    assert len(lives.planned) > 4 and set(lives.arrivals.values()) == set(lives.admissions.values()) == {1}
    assert set(lives.admissions) == lives.planned
    assert all(scheduler.policy.told[id]["DREW"] for id in lives.planned)


def test_every_sequence_of_which_a_policy_is_told_arrives_and_finishes_once():
    world = World((FULL,), policy="own_policies:Counting", depth=2, seed=5)
    for _ in range(400):
        world.rng.choice([world.submit, world.abort, world.preempt, *[world.step] * 9])()
    world.drain()
    assert any(request.beam for request in world.requests.values())
    counts = world.scheduler.policy.told.values()
    assert {(count["ARRIVED"], count["FINISHED"]) for count in counts} == {(1, 1)}


@pytest.mark.parametrize("policy", ["fcfs", "static"])
def test_a_priority_that_would_have_no_effect_is_refused(policy):
    scheduler, _ = engine(policy)
    with pytest.raises(InputError, match="scheduler priority"):
        scheduler.submit(ask("x", [1], priority=-1))


def test_an_answer_goes_on_where_another_engine_stopped():
    world = World((FULL,), policy="fcfs", depth=1, seed=0)
    prompt = [4, 8, 15, 16, 23, 42]
    world.requests["whole"] = ask("whole", prompt, tokens=12)
    world.scheduler.submit(world.requests["whole"])
    world.drain()
    whole = world.outputs["whole", 0]
    scheduler, executor = engine("fcfs")
    scheduler.submit(ask("rest", prompt, tokens=12, outputs=whole[:5]))
    events = [event for i in range(40) for event in step(scheduler, executor, 1.0 + i)[1]]
    assert events[0].index == 5 and [token for event in events for token in event.tokens] == whole[5:]
    for wrong in ({"outputs": whole}, {"outputs": [1], "pooling": "mean"}):
        with pytest.raises(InputError, match=r"outputs|drawn already"):
            scheduler.submit(ask("wrong", prompt, tokens=12, **wrong))
    scored = Params(max_tokens=12, prompt_logprobs=0)
    with pytest.raises(InputError, match="prompt_logprobs"):
        scheduler.submit(Request(id="scored", prompt=prompt, params=scored, outputs=whole[:5]))
