"""Chunks at other places, as the scheduler plans them, over a fake whose memory tells true KV from turned."""

import random

import pytest
from msgspec.structs import replace
from test_scheduler_property import FULL, SHORT_OR_LONG, VOCAB, WINDOW, World, layout, live

from quire.scheduling import Scheduler
from quire.types.blend import Blend
from quire.types.config import SchedulerOptions
from quire.types.errors import InputError
from quire.types.fake_tiers import FakeTiers
from quire.types.fakes import FakeExecutor
from quire.types.plan import Capacity
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams
from quire.types.transfer import DEVICE, TierSpec

HEAD = [7] * 6
DOCUMENTS = [[20 + d, *range(d, d + 17)] for d in range(4)]  # 18 tokens each: with the head, six pages of four
QUESTION = [90, 91, 92]


def world(*, pages=200, tokens=64, rope_shifts=True, groups=(FULL,), **options):
    capacity = Capacity(
        pages=pages, slots=8, max_model_len=120, max_batch_tokens=tokens, depth=1, rope_shifts=rope_shifts
    )
    executor = FakeExecutor(layout(*groups), capacity, vocab=VOCAB)
    return Scheduler(SchedulerOptions(), layout(*groups), capacity, **options), executor


def ask(name, documents, recompute=0.25, head=HEAD, max_error=0.0, salt="", **params):
    prompt, chunks = list(head), []
    for document in documents:
        chunks.append((len(prompt), len(prompt) + 18))
        prompt += DOCUMENTS[document]
    params = SamplingParams(**{"max_tokens": 3, "seed": 0, **params})
    blend = Blend(chunks, recompute, max_error)
    return Request(id=name, prompt=prompt + QUESTION, params=params, blend=blend, salt=salt)


def run(scheduler, executor):
    plans, events = [], []
    while scheduler.busy:
        plan = scheduler.plan(1.0)
        if plan is not None:
            plans.append(plan)
            events += scheduler.commit(plan, executor.submit(plan).result())
        scheduler.check()
    return plans, events


def test_a_chunk_is_computed_once_and_turned_to_wherever_it_stands():
    scheduler, executor = world()
    scheduler.submit(ask("first", [0, 1, 2]))
    plans, events = run(scheduler, executor)
    apart = [(row.start, row.count) for row in plans[0].rows]
    assert apart == [(0, 24), (4, 20)], "two chunks after the head, which they share; the first needs no place apart"
    assert [len(rope_shift.sources) for plan in plans for rope_shift in plan.rope_shifts] == [18, 18]
    assert [e.request for e in events] == ["first"] * 3, "nobody hears of the chunks themselves"
    assert scheduler.stats.blended_tokens == 0 and events[-1].counts.cached == 0, "all was computed for this request"

    scheduler.submit(ask("later", [2, 0, 1]))
    plans, events = run(scheduler, executor)
    assert plans[0].probes and not plans[0].rows, "everything is there: no chunk is computed again"
    assert [rope_shift.by for rope_shift in plans[0].rope_shifts] == [18, 36]
    # The head and document 2 are an ordinary prefix, as far as whole pages go.
    assert plans[0].probes[0].start == 24
    assert {len(e.tokens) for e in events} == {1} and events[0].counts.cached == 24 and events[0].counts.blended == 36
    computed = sum(row.count for row in plans[1].rows)
    assert computed == 9 + len(QUESTION), "a quarter of what was turned, and the question"
    assert scheduler.stats.recomputed_tokens == 9 + 9


@pytest.mark.parametrize(("recompute", "chosen"), [(0.0, 0), (1.0, 36)])
def test_nothing_or_everything_again(recompute, chosen):
    scheduler, executor = world()
    scheduler.submit(ask("a", [0, 1, 2], recompute))
    run(scheduler, executor)
    scheduler.submit(ask("b", [1, 2, 0], recompute))
    plans, _ = run(scheduler, executor)
    assert len(plans[0].probes) == (recompute > 0)
    first = next(plan for plan in plans if plan.samples)
    assert plans.index(first) == (recompute > 0), "without a choice to make, one step is enough"
    assert sum(row.count for row in first.rows) == chosen + len(QUESTION)


def test_the_tokens_that_deviate_most_are_chosen():
    scheduler, executor = world()
    scheduler.submit(ask("a", [0, 1, 2]))
    run(scheduler, executor)
    scheduler.submit(ask("b", [2, 0, 1]))
    probe = scheduler.plan(1.0)
    result = executor.submit(probe).result()
    start = probe.probes[0].start
    turned = {40, 41, 55, 30}
    result.deviations[0] = [100.0 if start + i in turned else 1.0 for i in range(probe.probes[0].count)]
    scheduler.commit(probe, result)
    plan = scheduler.plan(1.0)
    wanted = {p for row in plan.rows for p in range(row.start, row.start + row.count)}
    assert turned <= wanted and len(wanted) == 9 + len(QUESTION)
    scheduler.commit(plan, executor.submit(plan).result())
    run(scheduler, executor)


def test_a_chunk_behind_another_head_serves_too():
    scheduler, executor = world()
    scheduler.submit(ask("a", [0, 1]))
    run(scheduler, executor)
    other = [5, 4, 3, 2]
    scheduler.submit(ask("b", [1, 0], head=other))
    plans, events = run(scheduler, executor)
    assert [(shift.by, len(shift.sources)) for shift in plans[0].rope_shifts] == [(-2, 18), (16, 18)]
    assert plans[0].rows == [], "no chunk is computed behind this head"
    assert events[0].counts.blended == 36
    scheduler.submit(ask("c", [1, 0], head=other, salt="another tenant"))
    plans, events = run(scheduler, executor)
    assert events[0].counts.blended == 0 and plans[0].rows

    scheduler.submit(replace(ask("plain", [0], head=other), blend=None))
    run(scheduler, executor)
    scheduler.submit(ask("d", [1, 0], head=other))
    plans, _ = run(scheduler, executor)
    assert [shift.by for shift in plans[0].rope_shifts] == [-2, 18], "behind the own head, where it is cached there"


def test_a_chunk_behind_another_head_is_loaded_from_a_tier():
    tiers = FakeTiers((TierSpec("host", 300),), 4, seed=3)
    capacity = Capacity(
        pages=40, slots=8, max_model_len=120, max_batch_tokens=64, depth=1, rope_shifts=True, tiers=tiers.specs
    )
    executor = FakeExecutor(layout(FULL), capacity, vocab=VOCAB, tiers=tiers)
    scheduler = Scheduler(SchedulerOptions(), layout(FULL), capacity)
    scheduler.submit(ask("a", [0, 1]))
    run(scheduler, executor)
    for number in range(4):  # takes all pages of the device
        prompt = [50 + number] * 100
        scheduler.submit(Request(id=f"large {number}", prompt=prompt, params=SamplingParams(max_tokens=1, seed=0)))
    run(scheduler, executor)
    scheduler.submit(ask("b", [1, 0], head=[5, 4, 3, 2]))
    plans, _ = run(scheduler, executor)
    assert any(transfer.target == DEVICE for plan in plans for transfer in plan.transfers)
    computed = sum(row.count for plan in plans for row in plan.rows if not plan.samples)
    assert computed <= 8, "of a chunk computed before only its last page, behind what was loaded"


@pytest.mark.parametrize(("max_error", "chosen"), [(0.0, 36), (0.06, 35), (1.0, 4), (100.0, 0)])
def test_as_many_are_computed_again_as_the_error_asks_for(max_error, chosen):
    scheduler, executor = world()
    scheduler.submit(ask("a", [0, 1, 2]))
    run(scheduler, executor)
    scheduler.submit(ask("b", [2, 0, 1], 1.0, max_error=max_error))
    probe = scheduler.plan(1.0)
    result = executor.submit(probe).result()
    start, far = probe.probes[0].start, {40, 41, 55, 30}
    result.deviations[0] = [100.0 if start + i in far else 0.09 for i in range(probe.probes[0].count)]
    scheduler.commit(probe, result)
    plan = scheduler.plan(1.0)
    assert plan.tokens == chosen + len(QUESTION)
    scheduler.commit(plan, executor.submit(plan).result())
    run(scheduler, executor)
    (told,) = scheduler.timelines("b")
    assert told.recomputed == chosen
    left = 0.09 * (36 - max(4, chosen)) + 100.0 * (4 - min(4, chosen))
    assert told.blend_error == pytest.approx((left / 36) ** 0.5, abs=1e-6)


def test_turned_pages_have_no_names():
    scheduler, executor = world()
    for _ in range(2):
        scheduler.submit(ask("a", [0, 1, 2], 1.0))
        run(scheduler, executor)
    plain = replace(ask("plain", [0, 1, 2]), blend=None)
    scheduler.submit(plain)
    _, events = run(scheduler, executor)  # the fake sees it if this read anything that was turned
    assert events[0].counts.cached == 24, "the head and the first document are exact, the rest was approximate"
    scheduler.submit(replace(ask("again", [0, 1, 2]), id="again"))
    _, events = run(scheduler, executor)
    assert events[0].counts.cached == 60 and events[0].counts.blended == 0, "exact pages are better than turned ones"


def test_an_aborted_request_takes_its_chunks_along():
    scheduler, executor = world(tokens=8)
    scheduler.submit(ask("a", [0, 1, 2]))
    plan = scheduler.plan(1.0) or scheduler.plan(1.0)
    assert plan.rows
    assert [e.finish for e in scheduler.abort("a")] == ["abort"]
    scheduler.commit(plan, executor.submit(plan).result())
    scheduler.check()
    assert not scheduler.busy and scheduler.plan(2.0) is None


def test_what_cannot_be_blended_is_refused():
    for made, message in (
        (world(rope_shifts=False), "learned its positions"),
        (world(groups=(FULL, WINDOW)), "sliding windows"),
        (world(groups=(WINDOW,)), "sliding windows"),
        (world(prefix_cache=False), "prefix cache is off"),
    ):
        with pytest.raises(InputError, match=message):
            made[0].submit(ask("a", [0, 1]))
    scheduler, _ = world()
    with pytest.raises(InputError, match="prompt_logprobs"):
        scheduler.submit(ask("a", [0, 1], prompt_logprobs=0))
    with pytest.raises(InputError, match="kv_budget"):
        scheduler.submit(ask("a", [0, 1], kv_budget=32))
    for chunks in ([(3, 2)], [(0, 5), (4, 9)], [(40, 400)], [(-1, 4)]):
        with pytest.raises(InputError, match="follow each other"):
            scheduler.submit(replace(ask("a", [0, 1]), blend=Blend(chunks)))


class BlendedWorld(World):
    """Some requests have chunks."""

    def submit(self):
        if self.rng.random() < 0.6:
            return super().submit()
        prompt, chunks = [8] * self.rng.choice([0, 3, 9]), []
        for document in self.rng.sample(range(6), self.rng.randint(1, 4)):
            text = random.Random(document).choices(range(VOCAB), k=5 + 3 * document)
            prompt += [1] * self.rng.choice([0, 0, 2]) if chunks else []
            chunks.append((len(prompt), len(prompt) + len(text)))
            prompt += text
        prompt = (prompt + [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 5))])[:80]
        chunks = [(start, end) for start, end in chunks if end <= len(prompt)]
        params = SamplingParams(
            n=self.rng.choice([1, 1, 3]), seed=self.rng.randrange(5), max_tokens=self.rng.randint(1, 9),
            stop_token_ids=[self.rng.randrange(VOCAB)],
        )  # fmt: skip
        request = Request(
            id=f"r{len(self.requests)}", prompt=prompt, params=params, arrival=self.now,
            blend=Blend(chunks, self.rng.choice([0.0, 0.2, 1.0])),
        )  # fmt: skip
        self.requests[request.id] = request
        self.scheduler.submit(request)
        return None


@SHORT_OR_LONG
@pytest.mark.parametrize(("depth", "drafts", "tiers"), [(1, 0, True), (2, 4, False), (2, 0, True)])
def test_random_life_with_chunks(depth, drafts, tiers, operations):
    fakes = FakeTiers((TierSpec("host", 60),), 4, seed=3) if tiers else None
    world = BlendedWorld((FULL,), policy="fcfs", depth=depth, seed=5, pages=50, drafts=drafts, tiers=fakes)
    live(world, "fcfs", True, operations, drafts)
    stats = world.scheduler.stats
    assert stats.blended_tokens > operations / 10 and stats.recomputed_tokens > operations / 25
