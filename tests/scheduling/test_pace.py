"""Steps that end in time: what is learned, and what that does to prompts beside streams."""

from quire.scheduling.pace import CONTEXT, LEAST, Pace
from quire.types.plan import Row, StepPlan


def plan_of(work):
    return StepPlan(step=1, rows=[Row(0, 5, 1), *([Row(1, 0, work)] if work else [])])


def learn(pace, base, rate, works, now=1.0):
    for work in works:
        now += base + rate * work
        pace.ended(now, plan_of(work), alone=False)
    return now


def test_without_a_target_nothing_is_cut():
    pace = Pace(None, 512)
    learn(pace, 0.1, 1.0, [0, 512, 512])
    assert pace.budget(flowing=True) == 512
    assert pace.fit(100_000, 512) == 512 and pace.cost(100_000, 7) == 7


def test_the_budget_meets_the_target_once_steps_were_seen():
    pace = Pace(0.05, 8192)
    assert pace.budget(flowing=True) == 8192, "nothing is known yet"
    learn(pace, 0.01, 1e-5, [0] * 40 + [2048] * 40)
    assert 3500 < pace.budget(flowing=True) < 4500, "(50 - 10) ms at 10 us a token"
    assert pace.budget(flowing=False) == 8192, "nobody is waiting for a next token"


def test_prompts_get_on_however_slow_steps_are():
    pace = Pace(0.001, 8192)
    learn(pace, 0.01, 1e-3, [0] * 20 + [512] * 20)
    assert pace.budget(flowing=True) == LEAST
    assert pace.fit(100 * CONTEXT, LEAST) == 1 and pace.fit(0, 0) == 0


def test_tokens_far_back_count_for_more():
    pace = Pace(0.05, 8192)
    assert pace.fit(CONTEXT, 1000) == 500 and pace.cost(CONTEXT, 500) == 1000


def test_waiting_for_work_is_not_a_slow_step():
    pace = Pace(0.05, 8192)
    now = learn(pace, 0.01, 1e-5, [0] * 40 + [2048] * 40)
    before = pace.budget(flowing=True)
    pace.ended(now + 1000, plan_of(2048), alone=True)
    assert pace.budget(flowing=True) == before
