"""Steps that end in time: what is learned, and what that does to prompts beside streams."""

import pytest

from quire.scheduling.prefill_budget import MIN_PREFILL_TOKENS, Budget, PrefillLimiter
from quire.scheduling.step_times import WORK_DOUBLING_CONTEXT, StepTimes
from quire.types.plan import Probe, Row, StepPlan


def plan_of(work):
    return StepPlan(step=1, rows=[Row(0, 5, 1), *([Row(1, 0, work)] if work else [])])


def learn(prefill_limiter, base, rate, works, now=1.0):
    for work in works:
        now += base + rate * work
        prefill_limiter.ended(now, plan_of(work), began=None)
    return now


def test_without_a_target_nothing_is_cut():
    prefill_limiter = PrefillLimiter(0.0, 512)
    learn(prefill_limiter, 0.1, 1.0, [0, 512, 512])
    budget = prefill_limiter.budget(decoding=True)
    assert budget == Budget(512) and budget.fit(100_000) == 512
    assert budget.less(100_000, 7).fit(100_000) == 505


def test_the_budget_meets_the_target_once_steps_were_seen():
    prefill_limiter = PrefillLimiter(0.05, 8192)
    assert prefill_limiter.budget(decoding=True) == Budget(8192), "nothing is known yet"
    learn(prefill_limiter, 0.01, 1e-5, [0] * 40 + [2048] * 40)
    assert 3500 < prefill_limiter.budget(decoding=True).fit(0) < 4500, "(50 - 10) ms at 10 us a token"
    assert prefill_limiter.budget(decoding=False) == Budget(8192), "nobody is waiting for a next token"


def test_steps_are_filled_up_to_a_captured_size():
    """Padding takes as long as tokens do."""
    sizes = [(256, 8), (256, 64), (512, 64), (1024, 64)]
    prefill_limiter = PrefillLimiter(0.05, 8192, sizes)
    learn(prefill_limiter, 0.01, 5e-5, [0] * 40 + [511] * 40)
    budget = prefill_limiter.budget(decoding=True, rows=12)
    assert 790 < budget.work < 810, "(50 - 10) ms at 50 us a token"
    assert budget.fit(0) == 512 - 12
    assert prefill_limiter.budget(decoding=True, rows=150).fit(0) == 512 - 150
    assert prefill_limiter.budget(decoding=True, rows=12, target=0.2).fit(0) > 3000, "larger steps are not captured"
    assert prefill_limiter.budget(decoding=True, rows=12, target=0.02).fit(0) <= 200, "as many as are in time"


def test_prompts_get_on_however_slow_steps_are():
    prefill_limiter = PrefillLimiter(0.001, 8192)
    learn(prefill_limiter, 0.01, 1e-3, [0] * 20 + [512] * 20)
    budget = prefill_limiter.budget(decoding=True)
    assert budget.fit(0) == MIN_PREFILL_TOKENS and budget.fit(100 * WORK_DOUBLING_CONTEXT) == 1
    assert not budget.less(0, MIN_PREFILL_TOKENS).fit(0)


def test_tokens_far_back_count_for_more():
    budget = Budget(8192, 1000.0)
    assert budget.fit(0) == 1000 and budget.fit(WORK_DOUBLING_CONTEXT) == 500
    assert budget.less(WORK_DOUBLING_CONTEXT, 400) == Budget(7792, 200.0, begun=True)


def test_a_step_has_no_more_tokens_than_it_may_whatever_it_takes():
    """And those with cached context count as tokens there: time is left for them."""
    prefill_limiter = PrefillLimiter(0.3, 8192)
    learn(prefill_limiter, 0.01, 2e-5, [0] * 40 + [8192] * 10)
    budget = prefill_limiter.budget(decoding=True)
    assert budget.fit(0) == budget.fit(2048) == 8192
    assert budget.less(2048, 8000).fit(2048) == 192


def test_waiting_for_work_is_not_a_slow_step():
    prefill_limiter = PrefillLimiter(0.05, 8192)
    now = learn(prefill_limiter, 0.01, 1e-5, [0] * 40 + [2048] * 40)
    before = prefill_limiter.budget(decoding=True)
    prefill_limiter.ended(now + 1000, plan_of(2048), began=now + 1000 - 0.01 - 2048e-5)
    assert prefill_limiter.budget(decoding=True).work == pytest.approx(before.work)


def test_a_step_at_a_time_is_learned_from_too():
    prefill_limiter, now = PrefillLimiter(0.05, 8192), 1.0
    for work in [0] * 40 + [2048] * 40:
        began, now = now + 7.0, now + 7.0 + 0.01 + 1e-5 * work
        prefill_limiter.ended(now, plan_of(work), began=began)
    assert 3500 < prefill_limiter.budget(decoding=True).fit(0) < 4500


def test_a_step_that_took_long_is_got_over():
    """Also where prompts are then cut to just as many tokens as there must be."""
    prefill_limiter = PrefillLimiter(0.3, 8192)
    now = learn(prefill_limiter, 0.01, 2e-5, [0] * 40 + [8192] * 10)
    prefill_limiter.ended(now + 3.0, plan_of(0), began=None)
    assert prefill_limiter.budget(decoding=True).fit(0) == MIN_PREFILL_TOKENS
    learn(prefill_limiter, 0.01, 2e-5, [MIN_PREFILL_TOKENS] * 8, now + 3.0)
    assert prefill_limiter.budget(decoding=True).fit(0) > 4000


@pytest.mark.parametrize("late", [1.0, 5.0])
def test_a_small_step_that_took_long_is_got_over(late):
    """It spoils what is known of a token's time, and steps that are then cut to the least tell nothing about that."""
    prefill_limiter = PrefillLimiter(0.3, 8192)
    now = learn(prefill_limiter, 0.01, 2e-5, [0] * 40)
    now = learn(prefill_limiter, late, 2e-5, [100], now)
    assert prefill_limiter.budget(decoding=True).fit(0) == MIN_PREFILL_TOKENS
    for _ in range(30):
        now = learn(prefill_limiter, 0.01, 2e-5, [prefill_limiter.budget(decoding=True).fit(0)], now)
    assert prefill_limiter.budget(decoding=True).fit(0) > 4000


def test_where_streams_alone_take_too_long_nothing_is_tried():
    prefill_limiter = PrefillLimiter(0.005, 8192)
    now = learn(prefill_limiter, 0.01, 2e-5, [0] * 40 + [512] * 10)
    learn(prefill_limiter, 0.01, 2e-5, [MIN_PREFILL_TOKENS] * 50, now)
    assert prefill_limiter.budget(decoding=True).fit(0) == MIN_PREFILL_TOKENS
    assert prefill_limiter.seconds(0, 1) == pytest.approx(2e-5, rel=0.3)


def test_tokens_that_were_forgotten_are_not_attended():
    """Nor are steps with layers computed apart like others."""
    one, other = PrefillLimiter(0.05, 8192), PrefillLimiter(0.05, 8192)
    for now in (1.0, 1.1, 1.2):
        one.ended(now, StepPlan(step=1, rows=[Row(0, 0, 512)]), began=None)
        far = 9 * WORK_DOUBLING_CONTEXT
        other.ended(now, StepPlan(step=1, rows=[Row(0, far, 512, shift=far)]), began=None)
    assert one.budget(decoding=True) == other.budget(decoding=True)
    other.ended(9.0, StepPlan(step=1, rows=[Row(0, 0, 512)], probes=[Probe(0, 0, 8)]), began=None)
    assert one.budget(decoding=True) == other.budget(decoding=True)


def test_what_is_left_over_by_rounding_goes_to_nobody():
    budget = Budget(8192, 100.5)
    assert budget.less(0, budget.fit(0)).fit(0) == 0
    assert Budget(8192, 0.2).fit(0) == 1, "but somebody gets on"


def test_a_small_step_says_little_about_large_ones():
    """It takes longer than its tokens: a captured size is filled up, and weights are read for however few."""
    prefill_limiter = PrefillLimiter(0.3, 8192)
    prefill_limiter.ended(1.0, plan_of(100), began=1.0)
    now = learn(prefill_limiter, 0.0, 15e-3 / 100, [100])
    now = learn(prefill_limiter, 0.0, 3e-5, [2000], now)
    assert prefill_limiter.budget(decoding=True).work == pytest.approx(8700, rel=0.05)
    learn(prefill_limiter, 0.0, 15e-3 / 100, [100], now)
    assert prefill_limiter.budget(decoding=True).work > 7000


def test_steps_that_prompts_fill_up_to_the_target_are_not_late():
    """Else nobody would be admitted for as long as a long prompt takes, however much time each step has for others."""
    prefill_limiter = PrefillLimiter(0.3, 8192)
    prefill_limiter.budget(decoding=True, target=0.05)
    now = learn(prefill_limiter, 0.01, 1e-5, [0] * 40 + [4100] * 40)
    assert prefill_limiter.pace > 0.05 and not prefill_limiter.behind
    now = learn(prefill_limiter, 0.01, 1e-5, [6000] * 40, now)
    assert prefill_limiter.behind and 0 < prefill_limiter.recovery < 1, "much longer than they may be"
    learn(prefill_limiter, 0.06, 1e-5, [0] * 40, now)
    assert prefill_limiter.behind and prefill_limiter.room(10) < 0, "without prompts too"


def test_steps_with_few_rows_stay_known_while_there_are_many():
    """A burst that comes after many streams would else be thought to take as long for each prompt as those did."""
    times = StepTimes()
    for rows in [1] * 20 + [64] * 500:
        times.learn(0.006 + 0.0006 * rows, rows, 0.0)
    assert times.decode_seconds(1) == pytest.approx(0.0066) and times.decode_seconds(0) == times.decode_seconds(1)
    assert times.decode_seconds(64) == pytest.approx(0.0444)
    assert times.decode_seconds(32) == pytest.approx(0.0252, rel=0.05), "between those that were seen"
    assert times.decode_seconds(128) == pytest.approx(0.0828, rel=0.05), "and beyond"


def test_short_prompts_tell_what_a_token_takes():
    times = StepTimes()
    for _ in range(20):
        times.learn(0.006 + 0.0006 * 32, 0, 32.0)
        for _ in range(10):
            times.learn(0.0066, 1, 0.0)
    assert times.rate == pytest.approx(0.0006, rel=0.1)


def test_short_prompts_hardly_change_what_long_ones_told():
    times = StepTimes()
    for work in [0.0] * 10 + [2048.0] * 10:
        times.learn(0.01 + 1e-5 * work, 1, work)
    known = times.rate
    for _ in range(20):
        times.learn(0.02, 1, 16.0)
    assert times.rate == pytest.approx(known, rel=0.2)


def test_a_few_rows_that_took_long_once_are_got_over_by_many_that_do_not():
    times = StepTimes()
    times.learn(3.0, 1, 0.0)  # what is slow only once
    times.learn(0.05, 16, 0.0)
    assert times.decode_seconds(1) <= 0.05
