"""Policies that know lengths, targets, tenants and prefixes: what each does that others do not, and how long any
request waits."""

import random

import pytest
from msgspec.structs import replace
from test_policies import Admitted, ask, engine, step

from quire import LLM, SamplingParams
from quire.scheduling import LengthPredictor, OraclePredictor, Scheduler
from quire.scheduling import scheduler as scheduler_module
from quire.scheduling.length_mlp import LengthMLP
from quire.scheduling.length_predictor import ConstantPredictor
from quire.scheduling.policies import mlfq
from quire.scheduling.policies.targets import RELAXED_SHARE, STEP_MARGIN
from quire.types.beam import BeamParams
from quire.types.errors import DeadlineError, InputError
from quire.types.request import FinishReason, Request

STARVING = ["sjf", "srpt", "mlfq", "slo", "auto", "lpm"]


def order_of(policy, requests, *, slots=1, steps=400, **options):
    """In which order requests that are all there are admitted first."""
    admitted = Admitted()
    scheduler, executor = engine(policy, slots=slots, listeners=[admitted], **options)
    for request in requests:
        scheduler.submit(request)
    for i in range(steps):
        step(scheduler, executor, 1.0 + 0.1 * i)
    assert not scheduler.busy
    return list(dict.fromkeys(admitted.order))


def expecting(monkeypatch, lengths):
    """Have the scheduler's predictor know these lengths."""
    monkeypatch.setitem(scheduler_module.PREDICTORS, "mlp", lambda: OraclePredictor(lengths))


def test_shortest_jobs_go_first(monkeypatch):
    expecting(monkeypatch, {"long": 20, "short": 2, "middle": 9})
    requests = [ask(name, [i, 2, 3], tokens=20) for i, name in enumerate(("long", "short", "middle"))]
    assert order_of("sjf", requests) == ["short", "middle", "long"]


def test_a_much_shorter_job_displaces_under_srpt_and_one_that_is_a_little_shorter_does_not(monkeypatch):
    for length, displaced in ((2, 1), (25, 0)):
        expecting(monkeypatch, {"runs": 40, "comes": length})
        scheduler, executor = engine("srpt", slots=1)
        scheduler.submit(ask("runs", [1, 2, 3], tokens=40))
        step(scheduler, executor, 0.1)
        scheduler.submit(ask("comes", [4, 5, 6], tokens=40))
        step(scheduler, executor, 0.2)
        assert scheduler.stats.preemptions == displaced


def test_auto_pauses_only_answers_that_stay_ahead_of_their_target_and_lets_them_go_on_in_time(monkeypatch):
    """A token a tenth of a second: with 1 s asked for there is time to let a short answer through, with 0.1 s none."""
    for tpot, paused in ((1.0, 1), (0.1, 0), (0.0, 0)):
        expecting(monkeypatch, {"runs": 40, "short": 2, "other": 2})
        admitted = Admitted()
        scheduler, executor = engine("auto", slots=1, listeners=[admitted])
        scheduler.submit(ask("runs", [1, 2, 3], tokens=40, slo_ttft=9.0, slo_tpot=tpot))
        for i in range(8):
            step(scheduler, executor, 0.1 * i)
        for name in ("short", "other"):
            scheduler.submit(ask(name, [ord(name[0]), 5, 6], tokens=2, arrival=0.8, slo_ttft=30.0, slo_tpot=1.0))
        now, ends = 0.8, {}
        while scheduler.busy:
            for event in step(scheduler, executor, now)[1]:
                if event.finish:
                    ends[event.request] = now
            now += 0.1
        assert scheduler.stats.preemptions == paused
        assert (min(ends, key=ends.__getitem__) == "short") == bool(paused)
        assert ends["runs"] < 40 * 1.0


def test_auto_pauses_an_answer_for_one_that_must_begin_soon_however_long_that_is(monkeypatch):
    """Not at once, because it is not shorter; but when most of the time that it may wait has passed."""
    expecting(monkeypatch, {"runs": 80, "comes": 80})
    scheduler, executor = engine("auto", slots=1)
    scheduler.submit(ask("runs", [1, 2, 3], tokens=80, slo_ttft=9.0, slo_tpot=5.0))
    for i in range(8):
        step(scheduler, executor, 0.1 * i)
    scheduler.submit(ask("comes", [4, 5, 6], tokens=80, arrival=0.8, slo_ttft=4.0, slo_tpot=5.0))
    now, first = 0.8, None
    while first is None:
        told = step(scheduler, executor, now)[1]
        first = next((now for event in told if event.request == "comes"), None)
        now += 0.1
    assert scheduler.stats.preemptions == 1
    assert 0.8 + 0.7 * 4.0 < first <= 0.8 + 4.0


def test_auto_pauses_the_answer_that_came_last(monkeypatch):
    """Not the one that has outgrown all predictions and may be the longest: it is late enough without that."""
    expecting(monkeypatch, {"old": 10, "young": 10, "comes": 1})
    scheduler, executor = engine("auto", slots=2)
    scheduler.submit(ask("old", [1, 2, 3], tokens=60, slo_ttft=9.0, slo_tpot=5.0))
    for i in range(36):
        if i == 25:
            scheduler.submit(ask("young", [4, 5, 6], tokens=60, arrival=2.5, slo_ttft=9.0, slo_tpot=5.0))
        step(scheduler, executor, 0.1 * i)
    scheduler.submit(ask("comes", [7, 8, 9], tokens=60, arrival=3.6, slo_ttft=9.0, slo_tpot=5.0))
    step(scheduler, executor, 3.6)
    assert scheduler.stats.preemptions == 1
    assert {seq.request.id for seq in scheduler.sequences.running} == {"old", "comes"}


def test_what_was_paused_goes_on_before_its_time_is_up(monkeypatch):
    """However many shorter ones come."""
    names = [f"short{i}" for i in range(60)]
    expecting(monkeypatch, {"runs": 20, **dict.fromkeys(names, 4)})
    scheduler, executor = engine("auto", slots=1)
    scheduler.submit(ask("runs", [1, 2, 3], tokens=20, slo_ttft=9.0, slo_tpot=0.5))
    for i in range(6):
        step(scheduler, executor, 0.1 * i)
    for i, name in enumerate(names):
        scheduler.submit(ask(name, [4, i, 6], tokens=4, arrival=0.6, slo_ttft=30.0))
    now, ends = 0.6, {}
    while "runs" not in ends:
        for event in step(scheduler, executor, now)[1]:
            if event.finish:
                ends[event.request] = now
        now += 0.1
    assert scheduler.stats.preemptions >= 1 and len(ends) > 1, "others went first"
    assert ends["runs"] <= 20 * 0.5 + 0.1, "and it met its target"


def test_auto_looks_up_what_is_cached_of_interactive_requests_alone(monkeypatch):
    """A batch goes as it came: naming the pages of all its prompts first would hold up its first step."""
    scheduler, _ = engine("auto")
    asked = []
    monkeypatch.setattr(scheduler.policy.services, "matched", lambda id: asked.append(id) or 0)
    for i in range(3):
        scheduler.submit(ask(f"batch{i}", [i, 2, 3], background=True))
    assert not asked
    scheduler.submit(ask("chat", [9, 2, 3]))
    assert len(asked) == 1


def test_service_demotes_and_long_prompts_skip_levels(monkeypatch):
    monkeypatch.setattr(mlfq, "QUANTA", (20.0, 60.0))
    scheduler, executor = engine("mlfq", slots=1)
    scheduler.submit(ask("runs", [1, 2, 3], tokens=60))
    for i in range(8):  # 3 + 4 tokens for each one drawn: beyond the first quantum
        step(scheduler, executor, 0.1 * i)
    scheduler.submit(ask("skips", list(range(40)), tokens=3, arrival=1.0))
    step(scheduler, executor, 1.0)
    assert scheduler.stats.preemptions == 0, "it joins below the first level"
    scheduler.submit(ask("fresh", [7, 8], tokens=3, arrival=2.0))
    step(scheduler, executor, 2.0)
    assert scheduler.stats.preemptions == 1
    assert next(iter(scheduler.sequences.running)).request.id == "fresh"


def test_the_longest_cached_prefix_goes_first():
    admitted = Admitted()
    scheduler, executor = engine("lpm", slots=1, listeners=[admitted])
    stem = list(range(30))
    scheduler.submit(ask("first", stem, tokens=4))
    step(scheduler, executor, 0.1)
    for name, prompt in (("other", [90, 91, 92]), ("half", [*stem[:16], 95, 96]), ("whole", [*stem, 97])):
        scheduler.submit(ask(name, prompt, tokens=2, arrival=0.2))
    for i in range(60):
        step(scheduler, executor, 1.0 + i)
    assert admitted.order == ["first", "whole", "half", "other"]


@pytest.mark.parametrize("policy", ["slo", "auto"])
def test_what_is_too_late_goes_last_and_ends_only_if_that_is_asked_for(policy):
    for give_up in (False, True):
        admitted = Admitted()
        scheduler, executor = engine(policy, slots=1, listeners=[admitted], slo_give_up=give_up)
        scheduler.submit(ask("runs", [1], tokens=12))
        step(scheduler, executor, 0.0)
        scheduler.submit(ask("late", [2], tokens=2, slo_ttft=0.3))
        scheduler.submit(ask("later", [3], tokens=2, slo_ttft=500.0))
        ends = {}
        for i in range(40):
            for event in scheduler.expire(1.0 + i):
                ends[event.request] = (event.finish, event.error)
            for event in step(scheduler, executor, 1.0 + i)[1]:
                if event.finish:
                    ends[event.request] = (event.finish, event.error)
        if give_up:
            assert ends["late"] == (FinishReason.ERROR, DeadlineError.__name__) and scheduler.stats.gave_up == 1
            assert admitted.order == ["runs", "later"]
        else:
            assert ends["late"][0] is FinishReason.LENGTH and admitted.order == ["runs", "later", "late"]


@pytest.mark.parametrize("policy", ["slo", "auto"])
def test_a_prompt_that_has_begun_is_not_lost_before_its_deadline(policy):
    """It could not begin so late any more; but it has begun. All branches of what is given up end together."""
    scheduler, executor = engine(policy, slots=3, tokens=8, slo_give_up=True)
    scheduler.submit(ask("warm", [1] * 30, tokens=2))
    for i in range(6):  # eight tokens take half a second: that is learned
        step(scheduler, executor, 0.5 * i)
    scheduler.submit(ask("begun", list(range(40)), tokens=2, arrival=5.0, slo_ttft=4.0))
    two = ask("two", list(range(50)), tokens=2, arrival=5.0, slo_ttft=0.3)
    two.params.n = 2
    ends, now = {}, 5.0
    while scheduler.busy or now == 5.0:
        events = scheduler.expire(now)
        events += step(scheduler, executor, now)[1]
        if now == 5.0:
            scheduler.submit(two)
        ends |= {(event.request, event.branch): event.finish for event in events if event.finish}
        now += 0.5
    assert ends["begun", 0] is FinishReason.LENGTH
    assert ends["two", 0] is ends["two", 1] is FinishReason.ERROR and scheduler.stats.gave_up == 1


def test_least_slack_first_by_own_target_or_the_servers():
    requests = [
        ask("default", [1], tokens=1),
        ask("relaxed", [2], tokens=1, slo_ttft=9000.0),
        ask("tight", [3], tokens=1, slo_ttft=500.0),
    ]
    assert order_of("slo", requests, slo_ttft=1000.0) == ["tight", "default", "relaxed"]


def test_targets_for_each_token_bound_steps():
    scheduler, executor = engine("slo", slo_tpot=0.4)
    scheduler.submit(ask("a", [1, 2], tokens=4, slo_tpot=0.1))
    scheduler.submit(ask("b", [1, 2], tokens=4))
    assert scheduler.policy.latency_target(()) == pytest.approx(STEP_MARGIN * 0.4), "nobody waits for a next token yet"
    step(scheduler, executor, 0.5)
    assert scheduler.policy.latency_target(()) == pytest.approx(STEP_MARGIN * 0.1)
    for i in range(20):
        step(scheduler, executor, 1.0 + i)
    assert scheduler.policy.latency_target(()) == pytest.approx(STEP_MARGIN * 0.4)


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "fair", "auto", "slo"])
def test_background_work_runs_below_what_is_interactive(policy):
    batch = [ask(f"b{i}", [i, 1], tokens=3, background=True) for i in range(4)]
    live = [ask(f"i{i}", [i, 2, 3, 4, 5, 6], tokens=6, arrival=1.0) for i in range(3)]
    order = order_of(policy, [*batch, *live])
    assert set(order[:3]) == {"i0", "i1", "i2"}


@pytest.mark.parametrize("policy", STARVING)
def test_nobody_waits_much_longer_than_max_wait_while_others_keep_coming(policy, monkeypatch):
    """A stream of better requests as fast as they are served; the long one starts all the same."""
    monkeypatch.setattr(mlfq, "QUANTA", (20.0, 60.0))
    waits = {}
    for bound in (5.0, 1e9):
        admitted = Admitted()
        scheduler, executor = engine(policy, slots=1, listeners=[admitted], max_wait=bound, slo_ttft=300.0)
        stem = list(range(16))
        scheduler.submit(ask("warm", stem, tokens=1))
        long = ask("long", [90 + i % 7 for i in range(60)], tokens=20, slo_ttft=100_000.0)
        now, count = 0.0, 0
        for i in range(600):
            if i == 2:
                scheduler.submit(long)
            while len(scheduler.sequences.waiting) < 3:
                scheduler.submit(ask(f"s{count}", [*stem, count], tokens=1, arrival=now))
                count += 1
            step(scheduler, executor, now)
            now += 0.1
            if "long" in admitted.order:
                break
        waits[bound] = now
    assert waits[5.0] < 5.0 + 2.0, "one in eight of those admitted is the oldest"
    assert waits[1e9] > 30.0, "without the bound it starves"


@pytest.mark.parametrize("policy", ["sjf", "srpt", "auto"])
def test_a_prompt_under_way_does_not_wait_much_longer_than_max_wait_either(policy):
    """It was admitted at once; others that are better have taken all of every step since."""
    waits = {}
    for bound in (4.0, 1e9):
        scheduler, executor = engine(policy, slots=4, tokens=16, max_wait=bound, slo_ttft=300.0)
        stem = list(range(16))
        scheduler.submit(ask("warm", stem, tokens=1))
        step(scheduler, executor, 0.0)
        scheduler.submit(ask("long", [90 + i % 7 for i in range(80)], tokens=2, slo_ttft=100_000.0))
        now, count, drawn = 0.1, 0, False
        while not drawn and now < 40.0:
            _, events = step(scheduler, executor, now)
            drawn = any(event.request == "long" for event in events)
            now += 0.1
            while len(scheduler.sequences.waiting) < 3:
                size = 15 if count % 3 else 40
                scheduler.submit(ask(f"s{count}", [*stem, *[count % 50] * size], tokens=1, arrival=now))
                count += 1
        waits[bound] = now
    assert waits[4.0] < 4.0 + 3.0, "it goes before all others then"
    assert waits[1e9] > 2 * waits[4.0], "without the bound it waits as long as they come"


@pytest.mark.parametrize("policy", ["sjf", "srpt", "auto"])
def test_a_prompt_that_waited_too_long_leaves_others_a_part_of_its_steps(policy):
    """Its prompt takes many steps; a short one that comes then need not wait for all of them."""
    scheduler, executor = engine(policy, slots=4, pages=300, tokens=16, length=900, max_wait=5.0)
    scheduler.submit(ask("long", [90 + i % 7 for i in range(800)], tokens=2))
    step(scheduler, executor, 0.0)
    firsts: dict[str, int] = {}
    for i in range(1, 100):
        if i == 10:
            scheduler.submit(ask("short", [1, 2, 3, 4], tokens=2, arrival=6.0))
        _, events = step(scheduler, executor, 6.0 + 0.01 * i)
        for event in events:
            firsts.setdefault(event.request, i)
    assert firsts["short"] <= 13
    assert firsts["long"] <= 4 / 3 * 800 / 16


def test_a_prompt_that_waited_too_long_leaves_nothing_to_who_cannot_start():
    scheduler, executor = engine("sjf", slots=4, pages=220, tokens=16, length=900, max_wait=5.0)
    scheduler.submit(ask("long", [90 + i % 7 for i in range(800)], tokens=2))
    step(scheduler, executor, 0.0)
    for i in range(1, 100):
        if i == 20:
            scheduler.submit(ask("big", [50 + i % 7 for i in range(810)], tokens=2, arrival=6.2))  # there are no pages
        _, events = step(scheduler, executor, 6.0 + 0.01 * i)
        if any(event.request == "long" for event in events):
            break
    assert i <= 800 / 16 + 2


def test_a_plan_never_has_two_rows_of_one_sequence():
    """One that let better ones start first may lose its pages to another, and be admitted again by the same plan."""
    for policy in ("fcfs", "mlfq", "sjf", "auto"):
        for seed in range(2):
            rng = random.Random(seed)
            scheduler, executor = engine(policy, slots=6, pages=40, tokens=16, length=90, prefill_chunk=7)
            now = 0.0
            for i in range(350):
                now += 0.1
                if rng.random() < 0.5:
                    stem = [1] * rng.choice([0, 20, 40])
                    prompt = [*stem, *[rng.randrange(90) for _ in range(rng.randint(1, 35))]]
                    scheduler.submit(ask(f"r{i}", prompt, tokens=rng.randint(1, 25), arrival=now))
                plan, _ = step(scheduler, executor, now)
                rows = [row.slot for row in plan.rows] if plan is not None else []
                assert len(rows) == len(set(rows)), (policy, seed, i)


def test_beams_that_wait_for_a_slot_are_not_late_for_a_first_token_that_came_in_time():
    for policy in ("slo", "auto"):
        scheduler, executor = engine(policy, slots=4, slo_ttft=0.5, slo_give_up=True)
        beam = BeamParams(beams=3, n=3, max_tokens=20)
        params = SamplingParams(n=3, temperature=0.0, max_tokens=20, logprobs=beam.candidates(1))
        scheduler.submit(Request(id="beams", prompt=[1, 2, 3, 4, 5], params=params, beam=beam, arrival=1.0), 1.0)
        for name in ("a", "b"):
            scheduler.submit(ask(name, [7, 8, ord(name[0])], tokens=60, arrival=1.0), 1.0)
        ends = {}
        for i in range(150):
            now = 1.0 + 0.1 * i
            found = [*scheduler.expire(now), *step(scheduler, executor, now)[1]]
            ends |= {event.request: event.finish for event in found if event.finish}
        assert ends["beams"] is FinishReason.LENGTH


def test_a_long_prompt_under_way_lets_shorter_ones_start_and_goes_on_all_the_same():
    for policy, before in (("fcfs", 1), ("sjf", 4)):
        scheduler, executor = engine(policy, slots=8, tokens=16, length=90)
        scheduler.submit(ask("long", list(range(80)), tokens=2))
        step(scheduler, executor, 0.0)
        for i in range(3):
            scheduler.submit(ask(f"short{i}", [i, 99], tokens=4, arrival=0.1))
        plan, _ = step(scheduler, executor, 0.1)
        assert len(plan.rows) == before
        progress = next(seq for seq in scheduler.sequences.running if seq.request.id == "long").computed
        assert progress >= 16 + 4, "a part of the budget is its own"


def test_lengths_are_learned_and_how_well_is_told():
    predictor, rng = LengthMLP(), random.Random(1)
    hits = [0, 0]
    for i in range(3000):
        tenant = "code" if i % 2 else "chat"
        prompt = [0] * rng.randrange(10, 800)
        length = max(1, int(rng.lognormvariate(3.0 if tenant == "code" else 5.5, 0.4)))
        request = ask(f"r{i}", prompt, tokens=4000, tenant=tenant)
        expected = predictor.predict(request, 4000)
        assert 0 < expected.likely <= expected.high <= 4000 * 1.001
        if i >= 1000:
            hits = [hits[0] + (length <= expected.likely), hits[1] + (length <= expected.high)]
        predictor.learn(request, 4000, length)
        predictor.train()
    assert 0.42 < hits[0] / 2000 < 0.58 and 0.84 < hits[1] / 2000 < 0.96
    code, chat = (predictor.predict(ask("x", [0] * 100, tenant=t), 4000).likely for t in ("code", "chat"))
    assert code < 35 and chat > 150


def test_every_predictor_has_one_face():
    for predictor in (ConstantPredictor(), LengthMLP(), OraclePredictor({"a": 7})):
        found: LengthPredictor = predictor
        likely, high = found.predict(ask("a", [1, 2]), 50)
        assert 0 < likely <= high <= 50.01
        found.learn(ask("a", [1, 2]), 50, 7)


def test_calibration_is_counted():
    scheduler, executor = engine("sjf")
    for i in range(6):
        scheduler.submit(ask(f"r{i}", [i, 1], tokens=5))
    for i in range(60):
        step(scheduler, executor, 1.0 + i)
    stats = scheduler.snapshot()
    assert stats.lengths_predicted == 6 >= stats.lengths_below_high >= stats.lengths_below_likely
    assert scheduler.timelines("r0")[0].expected[1] > 0
    assert isinstance(scheduler, Scheduler)


def test_an_answer_that_only_its_limit_ends_is_as_long_as_that_and_teaches_nothing():
    scheduler, executor = engine("sjf")
    params = SamplingParams(max_tokens=5, seed=0, ignore_eos=True)
    scheduler.submit(Request(id="known", prompt=[1, 2], params=params))
    scheduler.submit(Request(id="guessed", prompt=[2, 2], params=replace(params, stop_token_ids=[1])))
    known, guessed = sorted(scheduler.sequences.waiting, key=lambda seq: seq.request.id, reverse=True)
    assert tuple(known.expected) == (5, 5) != tuple(guessed.expected)
    for i in range(20):
        step(scheduler, executor, 1.0 + i)
    assert scheduler.snapshot().lengths_predicted == 1


def test_goodput_counts_answers_that_met_their_own_targets_or_the_servers():
    scheduler, executor = engine("fcfs", slots=4, slo_ttft=1.0)
    for name, ttft, tpot in (("met", 0.0, 0.0), ("own", 100.0, 0.0), ("slow", 100.0, 0.5)):
        scheduler.submit(ask(name, [1, 2], tokens=5, slo_ttft=ttft, slo_tpot=tpot))
    for i in range(20):
        step(scheduler, executor, 0.5 + i)
    scheduler.submit(ask("late", [1, 2], tokens=5))  # arrived at 0
    for i in range(20, 40):
        step(scheduler, executor, 0.5 + i)
    stats = scheduler.snapshot()
    assert (stats.met_slo, stats.missed_ttft, stats.missed_tpot) == (2, 1, 1)


def test_targets_through_the_public_options(default_model):
    with LLM("smollm2-135m", kv_memory="64M", scheduler="auto", slo_ttft=30.0, max_seqs=2) as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        results = llm.generate(["Hi", "One two three"], params, slo_ttft=20.0, slo_tpot=5.0)
        assert all(len(result.outputs[0].token_ids) == 4 for result in results)
        assert llm.stats().lengths_predicted == 2
        with pytest.raises(InputError, match="slo_ttft"):
            llm.generate("Hi", params, slo_ttft=-1.0)


def test_under_auto_those_with_much_time_left_let_others_go_first_until_they_must_hurry():
    """Slack comes before little work; but only where others have much less time at all."""
    scheduler, executor = engine("auto", slots=1)

    def waits(name, prompt, target):
        scheduler.submit(ask(name, prompt, tokens=2, arrival=0.2, slo_ttft=target), 0.2)
        return next(seq for seq in scheduler.sequences.waiting if seq.request.id == name)

    scheduler.submit(ask("runs", [9, 9, 9], tokens=20, slo_ttft=1.0))
    step(scheduler, executor, 0.1)
    loose, tight, alike = waits("loose", [1, 2], 30.0), waits("tight", [3] * 9, 1.0), waits("alike", [4] * 5, 3.0)
    assert alike.rank < tight.rank < loose.rank
    step(scheduler, executor, 0.2 + (1 - RELAXED_SHARE) * 30.0 - 0.1)
    assert loose.rank > alike.rank or alike.id in scheduler.policy._targets.lost
    step(scheduler, executor, 0.2 + (1 - RELAXED_SHARE) * 30.0 + 0.1)
    assert loose.rank < min(tight.rank, alike.rank), "which are too late by now"
    for name in ("runs", "loose", "tight", "alike"):
        scheduler.abort(name)
    kept = scheduler.policy._targets
    assert not (kept.relaxed or kept.lost or kept._ttft)


def test_under_auto_those_with_much_time_left_leave_slots_and_steps_to_others_while_few_are_free():
    """With seven of eight slots taken none of them starts; a prompt of theirs under way takes a quarter of a step."""
    scheduler, executor = engine("auto", slots=8, pages=200, tokens=64, length=300, slo_tpot=0.5)

    def submit(name, prompt, tokens, now, target):
        scheduler.submit(ask(name, prompt, tokens=tokens, arrival=now, slo_ttft=target), now)

    def answers(first, last, now):
        for number in range(first, last):
            submit(f"answer{number}", [number, 7], 30, now, 1.0)
        step(scheduler, executor, now)

    answers(0, 2, 0.1)
    submit("loose", [*range(90, 99)] * 25, 2, 0.2, 100.0)
    step(scheduler, executor, 0.2)
    [loose] = [seq for seq in scheduler.sequences.running if seq.request.id == "loose"]
    assert loose.computed == 64, "all of a step"
    answers(2, 6, 0.3)
    before = loose.computed
    submit("later", [9] * 30, 2, 0.4, 100.0)
    step(scheduler, executor, 0.4)
    assert loose.computed - before == 16 and [seq.request.id for seq in scheduler.sequences.waiting] == ["later"]
    for number in range(6):
        scheduler.abort(f"answer{number}")
    before = loose.computed
    step(scheduler, executor, 0.5)
    assert loose.computed - before > 16 and not scheduler.sequences.waiting, "slots are free again"


def test_who_leaves_slots_to_others_does_not_wait_much_longer_than_max_wait_either():
    scheduler, executor = engine("auto", slots=16, pages=200, tokens=64, max_wait=5.0)
    started, now, count = None, 0.1, 0
    while started is None and now < 60.0:
        while len(scheduler.sequences.waiting) + len(scheduler.sequences.running) < 17:
            scheduler.submit(ask(f"live{count}", [count % 90, 7], tokens=6, arrival=now, slo_ttft=5.0), now)
            count += 1
        if now == 0.1:
            scheduler.submit(ask("loose", [91, 92, 93], tokens=2, arrival=now, slo_ttft=600.0), now)
        step(scheduler, executor, now)
        started = next((now for seq in scheduler.sequences.running if seq.request.id == "loose"), None)
        now += 0.1
    assert started is not None and started < 5.0 + 3.0


def test_nobody_leaves_slots_to_others_that_are_gone():
    scheduler, executor = engine("auto", slots=16, pages=400, tokens=64)
    scheduler.submit(ask("tight", [1, 2], tokens=1, slo_ttft=1.0))
    for number in range(32):
        scheduler.submit(ask(f"loose{number}", [number, 3], tokens=80, slo_ttft=600.0))
    for i in range(20):
        step(scheduler, executor, 0.1 + 0.1 * i)
    assert len(scheduler.sequences.running) == 16
