"""The scheduler's decisions, one at a time, over the fake executor."""

import pytest

from quire.memory import PageTable
from quire.scheduling import Scheduler
from quire.scheduling.plan_builder import DecodeBatch, PlanBuilder
from quire.scheduling.sequence import Sequence
from quire.types.beam import BeamParams
from quire.types.config import SchedulerOptions
from quire.types.errors import ConfigError, ContextLengthError, InputError, OverloadedError
from quire.types.fakes import FakeExecutor
from quire.types.grammar import GrammarSpec
from quire.types.kv import KVGroup, KVLayout
from quire.types.plan import Capacity
from quire.types.request import TRANSITIONS, FinishReason, Request, Status
from quire.types.sampling_params import SamplingParams

LAYOUT = KVLayout((KVGroup(layers=(0,), tokens_per_page=4, kv_heads=1, head_dim=1),), "float32")


def world(*, pages=100, slots=8, tokens=32, depth=1, length=80, context=0, **options):
    capacity = Capacity(
        pages=pages, slots=slots, max_model_len=length, context=context, max_batch_tokens=tokens, depth=depth
    )
    return Scheduler(SchedulerOptions(**options), LAYOUT, capacity), FakeExecutor(LAYOUT, capacity)


def ask(name, prompt, *, priority=0, arrival=0.0, **params):
    params = {"max_tokens": 4, **params}
    return Request(id=name, prompt=prompt, params=SamplingParams(**params), priority=priority, arrival=arrival)


def step(scheduler, executor, now=0.0):
    plan = scheduler.plan(now)
    return plan, scheduler.commit(plan, executor.submit(plan).result())


def test_chunked_prefill_and_decode_share_a_step():
    scheduler, executor = world(tokens=8)
    scheduler.submit(ask("a", [1, 2, 3], max_tokens=20))
    step(scheduler, executor)
    scheduler.submit(ask("b", list(range(30))))
    plan, _ = step(scheduler, executor)
    assert [(r.start, r.count) for r in plan.rows] == [(3, 1), (0, 8)], "decode first, beside the budget of prompts"
    assert len(plan.samples) == 1


def decoding(count):
    """Sequences that lack one token each, which a step in flight draws."""
    found = []
    for id in range(1, count + 1):
        seq = Sequence(ask(str(id), list(range(5 * id))), 0, id=id, limit=80, table=PageTable(1))
        seq.slot, seq.computed, seq.epoch, seq.pending = 10 - id, 5 * id, id % 2, 1
        found.append(seq)
    return found


def test_decode_rows_planned_together_are_those_planned_one_by_one():
    together, one_by_one = PlanBuilder(1), PlanBuilder(1)
    some, same = decoding(5), decoding(5)
    together.row(some[0], 3)
    one_by_one.row(same[0], 3)
    together.decode_rows(DecodeBatch(some[1:]))
    for seq in same[1:]:
        one_by_one.row(seq, 1)
        one_by_one.sample(seq)
    assert together.plan == one_by_one.plan and together.tokens == one_by_one.tokens == 7
    for mine, other in zip(some, same, strict=True):
        assert (mine.computed, mine.attained, mine.pending) == (other.computed, other.attained, other.pending)
    for mine, other in ((together.rows, one_by_one.rows), (together.samples, one_by_one.samples)):
        assert [(seq.id, epoch) for seq, epoch in mine] == [(seq.id, epoch) for seq, epoch in other]
    assert [seq.id for seq in together.members] == [seq.id for seq in one_by_one.members]


def test_a_step_is_planned_anew_when_a_slot_changes_hands():
    """What most steps have of the step before is not taken from a sequence that was preempted since."""
    scheduler, executor = world(slots=2)
    for name in ("a", "b"):
        scheduler.submit(ask(name, [ord(name), 2, 3], max_tokens=40))
    for _ in range(3):
        plan, _ = step(scheduler, executor)
    first, second = scheduler.sequences.running
    slots = first.slot, second.slot
    scheduler.sequences.preempt(second)
    scheduler.sequences.preempt(first)
    for _ in range(2):
        plan, _ = step(scheduler, executor)
        scheduler.check()
    assert {row.slot for row in plan.rows} == set(slots)
    assert all(seq.slot == row.slot for row, seq in zip(plan.rows, scheduler.sequences.running, strict=True))


def test_without_streams_first_tokens_and_ends_are_told_of_alone():
    capacity = Capacity(pages=100, slots=8, max_model_len=80, max_batch_tokens=32, depth=1)
    told = {}
    for streams in (True, False):
        scheduler = Scheduler(SchedulerOptions(), LAYOUT, capacity, streams=streams)
        executor = FakeExecutor(LAYOUT, capacity)
        scheduler.submit(ask("a", [1, 2, 3], max_tokens=6))
        events = [event for _ in range(6) for event in step(scheduler, executor)[1]]
        told[streams] = [(event.index, event.finish) for event in events]
        assert scheduler.stats.output_tokens == 6 and not scheduler.busy
    assert [index for index, _ in told[True]] == [0, 1, 2, 3, 4, 5]
    assert told[False] == [(0, None), (5, FinishReason.LENGTH)]


def test_a_policy_that_looks_at_a_step_sees_every_row_and_its_tokens():
    scheduler, executor = world(tokens=8, scheduler="own_policies:RowsSeen")
    scheduler.submit(ask("a", [1, 2, 3], max_tokens=20))
    step(scheduler, executor)
    scheduler.submit(ask("b", list(range(30))))
    step(scheduler, executor)
    assert scheduler.policy.seen == [[("a", 3)], [("a", 1), ("b", 8)]]


@pytest.mark.parametrize(("target", "depth", "drafts"), [(0.0, 2, 0), (0.1, 1, 0), (0.1, 2, 0), (0.1, 2, 3)])
def test_a_long_prompt_is_cut_so_that_streams_go_on(target, depth, drafts):
    """On a device that takes 10 ms for a step and 0.1 for a prompt token: 410 for as many as one may have."""
    capacity = Capacity(
        pages=2200, slots=4, max_model_len=8000, max_batch_tokens=4000, depth=depth, step_target=target, drafts=drafts
    )
    scheduler, executor = Scheduler(SchedulerOptions(), LAYOUT, capacity), FakeExecutor(LAYOUT, capacity)
    in_flight, now, chunks = [], 1.0, []
    scheduler.submit(ask("stream", [1, 2, 3], max_tokens=200))
    for number in range(60):
        if number == 10:
            scheduler.submit(ask("warm", [5] * 500))
        if number == 20:
            scheduler.submit(ask("long", [7] * 7900))
        plan = scheduler.plan(now)
        in_flight += [plan] if plan else []
        if len(in_flight) == depth or not plan:
            plan = in_flight.pop(0)
            work = sum(row.count for row in plan.rows if row.count > 1)
            now += 0.01 + 1e-4 * work
            chunks += [work] if work and number >= 20 else []
            scheduler.commit(plan, executor.submit(plan).result(), now)
    assert sum(chunks) == 7900
    assert chunks == [4000, 3900] if not target else all(500 < chunk < 1200 for chunk in chunks[:-1])


def test_pages_computed_in_this_step_are_a_hit_for_others_in_it():
    scheduler, executor = world(tokens=64)
    for i in range(4):
        scheduler.submit(ask(f"r{i}", [*range(16), 50 + i]))
    plan, _ = step(scheduler, executor)
    assert [(r.start, r.count) for r in plan.rows] == [(0, 17), (16, 1), (16, 1), (16, 1)]
    assert scheduler.stats.cached_tokens == 48


@pytest.mark.parametrize(("length", "first"), [(3, 64), (79, 52)])
def test_an_idle_device_begins_with_some_of_a_crowd(length, first):
    """Sixty-four of them, or as many as bring 4,096 tokens; plans are made while it works, so the rest comes then."""
    scheduler, _ = world(slots=100, tokens=8192, pages=9999, depth=2)
    for i in range(100):
        scheduler.submit(ask(f"r{i}", [i] * length, max_tokens=1))
    assert [len(scheduler.plan(0.0).rows) for _ in range(2)] == [first, 100 - first]
    scheduler, _ = world(slots=100, tokens=8192, pages=9999)
    for i in range(100):
        scheduler.submit(ask(f"r{i}", [i] * length, max_tokens=1))
    assert len(scheduler.plan(0.0).rows) == 100, "nothing is planned while a step runs"


def test_others_wait_for_pages_that_take_several_steps():
    scheduler, executor = world(tokens=10)
    for i in range(3):
        scheduler.submit(ask(f"r{i}", [*range(24), 50 + i]))
    rows = []
    while scheduler.busy:
        plan, _ = step(scheduler, executor)
        rows += [(r.start, r.count) for r in plan.rows if r.start < 24]
    assert sum(count for _, count in rows) == 25 + 0, "the shared 24 tokens are computed once"
    assert scheduler.stats.cached_tokens == 48


def test_waiting_for_somebody_who_is_aborted_ends_the_wait():
    scheduler, executor = world(tokens=10)
    scheduler.submit(ask("first", [*range(24), 1]))
    scheduler.submit(ask("second", [*range(24), 2]))
    step(scheduler, executor)
    scheduler.abort("first")
    events = []
    while scheduler.busy:
        events += step(scheduler, executor)[1]
    assert {e.request for e in events} == {"second"}


def test_branches_share_the_prompt_and_copy_its_last_page():
    scheduler, executor = world()
    scheduler.submit(ask("a", list(range(10)), n=3))
    plan, events = step(scheduler, executor)
    assert len(plan.rows) == 1 and len(plan.samples) == 3 and len(events) == 3
    assert scheduler.memory.pool.used == 3
    plan, _ = step(scheduler, executor)
    assert len(plan.copies) == 2, "the last holder keeps the page"


def test_branches_without_a_slot_start_later():
    scheduler, executor = world(slots=2)
    scheduler.submit(ask("a", list(range(10)), n=4))
    ended = []
    while scheduler.busy:
        ended += [e.branch for e in step(scheduler, executor)[1] if e.finish]
        scheduler.check()
    assert sorted(ended) == [0, 1, 2, 3]


def constrained(name, prompt, **params):
    return ask(name, prompt, grammar=GrammarSpec("json_object"), **params)


def test_a_grammar_has_one_step_in_flight_and_others_do_not_wait_for_it():
    scheduler, executor = world(depth=2)
    scheduler.submit(constrained("a", [1, 2, 3], max_tokens=9))
    scheduler.submit(ask("b", [4, 5, 6], max_tokens=9))
    first = scheduler.plan(0.0)
    result = executor.submit(first).result()
    second = scheduler.plan(0.0)
    assert len(first.samples) == 2 and [r.slot for r in second.rows] == [first.rows[1].slot]
    executor.submit(second)
    scheduler.commit(first, result)
    assert len(scheduler.plan(0.0).rows) == 2


def test_forced_tokens_are_written_and_computed_with_the_next_row():
    scheduler, executor = world()
    scheduler.submit(constrained("a", [1, 2, 3], max_tokens=20))
    plan, _ = step(scheduler, executor)
    while scheduler.busy:
        before = plan
        plan, _ = step(scheduler, executor)
        assert plan.rows[0].count == 1 + sum(len(w.tokens) for w in plan.writes)
        assert plan.rows[0].start == before.rows[0].start + before.rows[0].count
    assert scheduler.stats.forced_tokens > 0
    assert scheduler.stats.steps == scheduler.stats.output_tokens - scheduler.stats.forced_tokens


def test_a_grammar_that_ends_or_fails_ends_its_own_sequence():
    scheduler, executor = world()
    for name in ("ends", "fails", "lives"):
        scheduler.submit(constrained(name, [len(name), 7, 8]))
    plan = scheduler.plan(0.0)
    result = executor.submit(plan).result()
    result.ended, result.errors = [0], {1: "too complex"}
    ends, fails, lives = scheduler.commit(plan, result)
    assert ends.finish is FinishReason.STOP and ends.tokens
    assert fails.finish is FinishReason.ERROR and "too complex" in fails.message and fails.error == "InputError"
    assert lives.finish is None
    scheduler.check()


def test_searches_that_stand_in_each_others_way_all_end():
    scheduler, executor = world(pages=1 + 18, slots=6, depth=2)
    beam = BeamParams(beams=4, n=2, max_tokens=12)
    for i in range(6):
        request = ask(f"r{i}", [i, 7, 8], n=2, max_tokens=12, logprobs=beam.candidates(0), arrival=float(i))
        request.beam = beam
        scheduler.submit(request)
    tickets, ended, steps = [], [], 0
    while scheduler.busy or tickets:
        plan = scheduler.plan(0.0)
        if plan is not None:
            tickets.append((plan, executor.submit(plan)))
        if plan is None or len(tickets) == 2:
            plan, ticket = tickets.pop(0)
            ended += [e.request for e in scheduler.commit(plan, ticket.result()) if e.finish]
        scheduler.check()
        steps += 1
        assert steps < 2000
    assert sorted(ended) == sorted(f"r{i}" for i in range(6) for _ in range(2))
    assert scheduler.stats.preemptions > 0


def test_nothing_is_kept_of_a_request_that_is_aborted_while_its_prompt_is_scored():
    scheduler, executor = world(tokens=8, depth=2)
    scheduler.submit(ask("a", list(range(30)), prompt_logprobs=0))
    plans = [scheduler.plan(0.0) for _ in range(2)]
    scheduler.abort("a")
    for plan in plans:
        scheduler.commit(plan, executor.submit(plan).result())
    assert not scheduler._commit._scores


def test_running_out_of_pages_preempts_the_last_to_come():
    scheduler, executor = world(pages=1 + 9, slots=2)
    scheduler.submit(ask("old", list(range(14)), max_tokens=12, arrival=0))
    scheduler.submit(ask("new", list(range(20, 34)), max_tokens=12, arrival=1))
    finished = []
    while scheduler.busy:
        finished += [e.request for e in step(scheduler, executor)[1] if e.finish]
        scheduler.check()
    assert finished == ["old", "new"] and scheduler.stats.preemptions >= 1


def test_priority_goes_first_and_waiting_earns_priority():
    scheduler, executor = world(slots=1, scheduler="priority", ageing=10.0)
    scheduler.submit(ask("low", [1], priority=5, arrival=0.0, max_tokens=1))
    scheduler.submit(ask("high", [2], priority=0, arrival=0.0, max_tokens=1))
    assert step(scheduler, executor, 1.0)[1][0].request == "high"
    scheduler.submit(ask("newer", [3], priority=0, arrival=60.0, max_tokens=1))
    assert step(scheduler, executor, 60.0)[1][0].request == "low", "sixty seconds are worth six levels"


def test_static_batches_do_not_mix_and_reserve_for_the_longest():
    scheduler, executor = world(scheduler="static", slots=2, tokens=8)
    for name, length, out in (("a", 10, 2), ("b", 3, 9), ("c", 3, 1)):
        scheduler.submit(ask(name, list(range(length)), max_tokens=out))
    order = []
    while scheduler.busy:
        _, events = step(scheduler, executor)
        order += [e.request for e in events if e.finish]
        if "b" not in order:
            assert scheduler.memory.pool.used <= 2 * 5, "ten and nine tokens in pages of four, for each"
            assert "c" not in order
    assert order == ["a", "b", "c"]
    assert (scheduler.memory.slots_filled, scheduler.memory.slots_allocated) == (11 + 11 + 3, 20 + 20 + 4)


@pytest.mark.parametrize("chunk", [3, 4, 6])
def test_prompts_that_begin_together_are_computed_once(chunk):
    """Whether or not a first chunk ends with a page: the page that it leaves half full is computed by one of them."""
    scheduler, executor = world(prefill_chunk=chunk)
    for name in "abc":
        scheduler.submit(ask(name, list(range(30)), max_tokens=2))
    while scheduler.busy:
        step(scheduler, executor)
    assert scheduler.stats.cached_tokens == 2 * 28


def test_a_static_batch_is_no_more_than_the_pool_holds():
    """Set aside for the longest prompt and the longest answer together, no sequence would ever fit."""
    scheduler, executor = world(scheduler="static", slots=2, pages=21, tokens=80)  # 80 tokens
    scheduler.submit(ask("a", [1] * 70, max_tokens=4))
    scheduler.submit(ask("b", [2] * 4, max_tokens=30))
    scheduler.submit(ask("c", [3] * 4, max_tokens=30))
    order = []
    for _ in range(60):
        if scheduler.busy:
            order += [event.request for event in step(scheduler, executor)[1] if event.finish]
    assert order == ["a", "b", "c"] and not scheduler.busy


@pytest.mark.parametrize(("length", "context"), [(80, 0), (200, 80)])
def test_a_static_batch_sets_no_more_aside_than_a_sequence_may_have(length, context):
    """The longest prompt and the longest answer may come to more than the context: a page table has no place for it."""
    scheduler, executor = world(scheduler="static", slots=2, tokens=80, length=length, context=context)
    scheduler.submit(ask("a", [1] * 70, max_tokens=4))
    scheduler.submit(ask("b", [2] * 4, max_tokens=30))
    plan, _ = step(scheduler, executor)
    assert len(plan.admits) == 2 and max(delta.index + len(delta.pages) for delta in plan.deltas) == 80 // 4


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (ask("x", []), InputError),
        (ask("x", [1] * 80), ContextLengthError),
        (ask("taken", [1]), InputError),
    ],
)
def test_impossible_requests_are_refused_with_a_reason(request_, error):
    scheduler, _ = world()
    scheduler.submit(ask("taken", [1]))
    with pytest.raises(error):
        scheduler.submit(request_)
    scheduler.check()


def test_a_request_larger_than_the_pool_is_refused():
    scheduler, _ = world(pages=1 + 3)
    with pytest.raises(ContextLengthError, match="KV pool"):
        scheduler.submit(ask("x", [1] * 10, max_tokens=10))


def test_the_queue_is_bounded():
    scheduler, _ = world(max_waiting=2)
    scheduler.submit(ask("a", [1]))
    scheduler.submit(ask("b", [1]))
    with pytest.raises(OverloadedError):
        scheduler.submit(ask("c", [1]))


def test_failure_ends_everything_and_the_scheduler_goes_on():
    scheduler, executor = world(depth=2)
    scheduler.submit(ask("a", list(range(9)), n=2))
    plan = scheduler.plan(0.0)
    executor.submit(plan)
    events = scheduler.fail("broken")
    assert [(e.finish, e.message) for e in events] == [(FinishReason.ERROR, "broken")] * 2
    scheduler.check()
    assert scheduler.memory.pool.used == 0 and scheduler.memory.pool.cached == 0
    scheduler.submit(ask("b", list(range(9)), max_tokens=1))
    assert step(scheduler, executor)[1][0].request == "b"


def test_unknown_policy():
    with pytest.raises(ConfigError, match="fcfs"):
        world(scheduler="lottery")


def test_no_way_back_from_the_end():
    assert not TRANSITIONS[Status.FINISHED]
    assert set(TRANSITIONS) == set(Status)
