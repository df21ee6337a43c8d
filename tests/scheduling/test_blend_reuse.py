"""Chunks at other places, as the scheduler plans them, over a fake whose memory tells true KV from turned."""

import random

import pytest
from msgspec.structs import replace
from test_scheduler_property import FULL, SHORT_OR_LONG, VOCAB, WINDOW, World, layout, live

from quire.scheduling import Scheduler
from quire.scheduling.features import blend_sources
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


def warmed(**options):
    """Every document has been first, and behind another one: all were ordinary prefixes."""
    scheduler, executor = world(**options)
    for pair in ([0, 1], [1, 2], [2, 3], [3, 0]):
        scheduler.submit(ask(str(pair), pair))
        run(scheduler, executor)
    assert scheduler.stats.blended_tokens == scheduler.stats.recomputed_tokens == 0
    return scheduler, executor


def test_a_chunk_is_computed_once_and_turned_to_wherever_it_stands():
    scheduler, executor = world()
    scheduler.submit(ask("first", [0, 1, 2]))
    plans, events = run(scheduler, executor)
    apart = [(row.start, row.count) for row in plans[0].rows]
    assert apart == [(0, 41)], "the last behind the head and the first, as far as whole pages go; the others in place"
    assert [len(rope_shift.sources) for plan in plans for rope_shift in plan.rope_shifts] == [16]
    assert [e.request for e in events] == ["first"] * 3, "nobody hears of the chunks themselves"
    assert events[-1].counts.cached == 0, "all was computed for this request"
    assert scheduler.stats.blended_tokens == events[-1].counts.blended == 16, "and one of them was copied"
    assert 0 < scheduler.stats.recomputed_tokens <= 16

    scheduler, executor = warmed()
    scheduler.submit(ask("later", [2, 0, 1]))
    plans, events = run(scheduler, executor)
    looks = [(row.start, row.count, row.token_mass) for row in plans[0].rows]
    assert plans[0].probes and not plans[0].samples
    assert looks == [(40, 2, False), (58, 5, True)], "no chunk is computed again, only the question looks at all"
    assert [(shift.by, len(shift.sources)) for shift in plans[0].rope_shifts] == [(0, 16), (18, 16)]
    # The head and document 2 are an ordinary prefix, as far as whole pages go.
    assert plans[0].probes[0].start == 24
    assert {len(e.tokens) for e in events} == {1} and events[0].counts.cached == 24 and events[0].counts.blended == 32
    computed = sum(row.count for row in plans[1].rows)
    assert computed == 8 + 2 + 5, "a quarter of what was turned, and what no chunk covers"
    assert scheduler.stats.recomputed_tokens == 8


@pytest.mark.parametrize(("recompute", "chosen"), [(0.0, 0), (1.0, 32)])
def test_nothing_or_everything_again(recompute, chosen):
    scheduler, executor = warmed()
    scheduler.submit(ask("b", [1, 3, 0], recompute))
    plans, _ = run(scheduler, executor)
    assert not plans[0].probes and plans[0].samples, "without a choice to make, one step is enough"
    assert sum(row.count for row in plans[0].rows) == chosen + 7
    (told,) = scheduler.timelines("b")
    assert told.recomputed == chosen and told.blend_error == (0.0 if chosen else None)


def begin(scheduler, executor, request):
    """Its first step's plan and result."""
    scheduler.submit(request)
    plan = scheduler.plan(1.0)
    return plan, executor.submit(plan).result()


def go_on(scheduler, executor, plan, result):
    """Positions that its second step computes."""
    scheduler.commit(plan, result)
    plan = scheduler.plan(1.0)
    scheduler.commit(plan, executor.submit(plan).result())
    run(scheduler, executor)
    return [p for row in plan.rows for p in range(row.start, row.start + row.count)]


def test_the_tokens_that_the_question_pays_most_attention_to_are_chosen():
    scheduler, executor = warmed()
    plan, result = begin(scheduler, executor, ask("b", [2, 0, 1]))
    read = {33, 34, 55, 30}
    result.mass[1] = [9.0 if p < 24 or p in read else 0.1 for p in range(63)]
    computed = go_on(scheduler, executor, plan, result)
    assert read <= set(computed) and len(computed) == 8 + 7


def test_where_much_is_not_covered_the_tokens_that_deviate_most_are_chosen():
    scheduler, executor = warmed()
    request = ask("b", [2, 0, 1])
    plan, result = begin(scheduler, executor, replace(request, prompt=request.prompt + [33] * 20))
    assert not plan.rows, "to compute all this twice would take longer than it saves"
    start, far = plan.probes[0].start, {33, 34, 55, 30}
    result.deviations[0] = [100.0 if start + i in far else 1.0 for i in range(plan.probes[0].count)]
    computed = go_on(scheduler, executor, plan, result)
    assert far <= set(computed) and len(computed) == 8 + 7 + 20


def test_a_long_question_looks_in_pieces():
    scheduler, executor = warmed(tokens=8)
    request = ask("b", [2, 0, 1])
    request = replace(request, prompt=request.prompt + [33] * 8)
    plan, result = begin(scheduler, executor, request)
    rows = []
    while not plan.samples:
        rows += [(row.start, row.count) for row in plan.rows if row.token_mass]
        scheduler.commit(plan, result)
        plan = scheduler.plan(1.0)
        result = executor.submit(plan).result()
    scheduler.commit(plan, result)
    run(scheduler, executor)
    assert rows == [(58, 6), (64, 7)]


def test_a_prompt_may_end_with_a_chunk():
    for recompute in (0.0, 0.25):
        scheduler, executor = warmed()
        request = ask("b", [2, 0, 1], recompute)
        request = replace(request, prompt=request.prompt[:58], blend=Blend([(6, 24), (24, 42), (42, 58)], recompute))
        scheduler.submit(request)
        plans, events = run(scheduler, executor)
        assert len(events) == 3 and any(plan.rope_shifts for plan in plans)


def test_a_chunk_behind_another_head_serves_too():
    scheduler, executor = warmed()
    other = [5, 4, 3, 2]
    scheduler.submit(ask("b", [1, 0], head=other))
    plans, events = run(scheduler, executor)
    assert [(shift.by, len(shift.sources)) for shift in plans[0].rope_shifts] == [(-2, 18), (-2, 16)]
    looks = [(row.start, row.count) for row in plans[0].rows]
    assert looks == [(0, 4), (38, 5)], "the head and what no chunk covers: none is computed behind this head"
    assert min(row.start for row in plans[1].rows) >= 4, "the head is as it should be"
    assert events[0].counts.blended == 34
    scheduler.submit(ask("c", [1, 0], head=other, salt="another tenant"))
    plans, events = run(scheduler, executor)
    assert events[0].counts.blended == 0 and plans[0].rows and not plans[0].rope_shifts


def test_a_chunk_behind_another_head_is_loaded_from_a_tier():
    tiers = FakeTiers((TierSpec("host", 300),), 4, seed=3)
    capacity = Capacity(
        pages=40, slots=8, max_model_len=120, max_batch_tokens=64, depth=1, rope_shifts=True, tiers=tiers.specs
    )
    executor = FakeExecutor(layout(FULL), capacity, vocab=VOCAB, tiers=tiers)
    scheduler = Scheduler(SchedulerOptions(), layout(FULL), capacity)
    for pair in ([0, 1], [1, 0]):
        scheduler.submit(ask(str(pair), pair))
        run(scheduler, executor)
    for number in range(4):  # takes all pages of the device
        prompt = [50 + number] * 100
        scheduler.submit(Request(id=f"large {number}", prompt=prompt, params=SamplingParams(max_tokens=1, seed=0)))
    run(scheduler, executor)
    scheduler.submit(ask("b", [1, 0], head=[5, 4, 3, 2]))
    plans, _ = run(scheduler, executor)
    assert any(transfer.target == DEVICE for plan in plans for transfer in plan.transfers)
    computed = sum(row.count for plan in plans for row in plan.rows if not plan.samples)
    assert computed <= 9 + 2 * 4, "beside the head and the question only a page of each, behind what was loaded"


@pytest.mark.parametrize(("max_error", "chosen"), [(0.003, 31), (0.1, 4), (0.15, 4), (0.5, 0)])
def test_as_many_are_computed_again_as_the_error_asks_for(max_error, chosen):
    scheduler, executor = warmed()
    plan, result = begin(scheduler, executor, ask("b", [2, 0, 1], 1.0, max_error=max_error))
    far = {33, 34, 55, 30}
    result.deviations[0] = [0.25] * plan.probes[0].count
    result.mass[1] = [20.0 if p in far else 0.5 for p in range(63)]
    computed = go_on(scheduler, executor, plan, result)
    assert len(computed) == chosen + 7
    (told,) = scheduler.timelines("b")
    left = 0.5 * (32 - max(4, chosen)) + 20.0 * (4 - min(4, chosen))
    assert told.recomputed == chosen and told.blend_error == pytest.approx(0.5 * left / (14 + 80))


def test_turned_pages_have_no_names():
    scheduler, executor = world()
    for _ in range(2):
        scheduler.submit(ask("a", [0, 1, 2], 1.0))
        run(scheduler, executor)
    plain = replace(ask("plain", [0, 1, 2]), blend=None)
    scheduler.submit(plain)
    _, events = run(scheduler, executor)  # the fake sees it if this read anything that was turned
    assert events[0].counts.cached == 40, "the head and two documents are exact, the rest was approximate"
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
    for chunks, message in (
        ([(3, 2)], r"chunks\[0\] of blend, \[3, 2\), has no tokens"),
        ([(0, 5), (4, 9)], r"chunks\[1\] of blend, \[4, 9\), begins before chunks\[0\] ends, at 5"),
        ([(0, 5), (40, 400)], r"chunks\[1\] of blend, \[40, 400\), ends behind the prompt, which has"),
        ([(-1, 4)], r"chunks\[0\] of blend, \[-1, 4\), begins before the prompt"),
        ([(1, 2, 3)], r"chunks\[0\] of blend must be two positions"),
        ([5], r"chunks\[0\] of blend must be two positions"),
    ):
        with pytest.raises(InputError, match=message) as refused:
            scheduler.submit(replace(ask("a", [0, 1]), blend=Blend(chunks)))
        assert refused.value.param == "blend"


def test_what_was_computed_again_is_a_part_of_what_was_copied_however_often_it_began():
    scheduler, executor = warmed()
    scheduler.submit(ask("a", [2, 0, 1], max_tokens=4))
    plan = scheduler.plan(1.0)
    scheduler.commit(plan, executor.submit(plan).result())
    [seq] = scheduler.sequences.running
    first = seq.log.blended
    scheduler.sequences.preempt(seq)
    _, events = run(scheduler, executor)
    assert 0 < seq.log.recomputed <= seq.log.blended == events[-1].counts.blended == first


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


def test_what_is_remembered_of_chunks_is_bounded_by_the_tokens_before_them(monkeypatch):
    monkeypatch.setattr(blend_sources, "MAX_KNOWN_TOKENS", 100)
    scheduler, _ = world()
    sources = blend_sources.Sources(scheduler.memory)
    chunks = [[d] * 8 for d in range(6)]
    for chunk in chunks:
        sources.add("", [1] * 30, chunk, later=False)
        sources.add("", [1] * 30, chunk, later=False)  # the same again counts once
    assert [bool(sources.of("", chunk)) for chunk in chunks] == [False] * 3 + [True] * 3
    sources.add("", [1] * 500, chunks[0], later=False)
    assert [bool(sources.of("", chunk)) for chunk in chunks] == [True] + [False] * 5
