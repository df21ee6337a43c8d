"""Which page leaves a full tier, what the directory does about it, and what costs say."""

import pytest

from quire.memory.costs import Costs
from quire.memory.prefix import PrefixIndex
from quire.memory.ranking import Ranking
from quire.memory.tiers import ELSEWHERE, Directory
from quire.types.plan import StepPlan
from quire.types.transfer import TierSpec, TransferDone


def key(i):
    return 0, bytes([i])


def filled(policy):
    ranking = Ranking(policy)
    for i in range(4):
        ranking.add(key(i), worth=1.0)
    return ranking


def order(ranking, now=0.0):
    return [name[0] for _, name in iter(lambda: ranking.pop(now), None)]


def test_lru_drops_what_was_not_used_for_longest():
    ranking = filled("lru")
    ranking.use(key(0), 1.0)
    assert order(ranking) == [1, 2, 3, 0]


def test_lfu_drops_what_was_used_least_often():
    ranking = filled("lfu")
    for i in (3, 3, 2, 0, 0, 0):
        ranking.use(key(i), 1.0)
    assert order(ranking) == [1, 2, 3, 0]


def test_cost_drops_what_saves_least_and_fame_fades():
    ranking = filled("cost")
    ranking.use(key(0), 9.0)  # a prefix of much
    ranking.use(key(1), 2.0)
    assert order(ranking) == [2, 3, 1, 0]
    ranking.add(key(5), 1.0)  # on top of what the last to leave was worth: a newcomer is not at once the worst
    ranking._floor, before = 100.0, ranking._floor
    ranking.add(key(6), 0.5)
    assert before > 0 and order(ranking) == [5, 6]


@pytest.mark.parametrize("policy", ["lru", "lfu", "cost"])
def test_pinned_pages_stay_until_their_time_is_up(policy):
    ranking = filled(policy)
    ranking.pin(key(0), 10.0)
    assert set(order(ranking, now=5.0)) == {1, 2, 3} and order(ranking, now=11.0) == [0]


def carried(directory, losing=()):
    """Let everything queued happen."""
    plan = StepPlan(step=1)
    directory.hand_over(plan)
    for way in plan.transfers:
        directory.finish(TransferDone(way.id, [k not in losing for k in way.keys], 0.01))
    return plan


def test_pages_leave_the_device_for_the_host_and_the_host_for_the_disk():
    directory = Directory([TierSpec("host", 2), TierSpec("disk", 9, kept=True)], PrefixIndex(), 1024)
    for i in range(3):
        directory.evict(key(i), page=i + 1)
        plan = carried(directory)
    ways = {(way.source, way.target): way.keys for way in plan.transfers}
    assert ways == {("device", "host"): [key(2)], ("host", "disk"): [key(0)]} and plan.drops[0].keys == [key(0)]
    assert directory.locate(key(0)).name == "disk" and directory.locate(key(2)).name == "host"
    assert directory.run(0, [bytes([i]) for i in range(5)]) == [ELSEWHERE] * 3


def test_computed_pages_go_to_what_is_kept_and_lost_ones_are_forgotten():
    directory = Directory([TierSpec("host", 2), TierSpec("disk", 9, kept=True)], PrefixIndex(), 1024)
    directory.save(key(1), page=1)
    assert [way.target for way in carried(directory).transfers] == ["disk"]
    directory.load([key(1)], [5], [directory.locate(key(1))])
    carried(directory, losing=[key(1)])
    assert directory.locate(key(1)) is None and directory.tier("disk").stats.missed == 1
    assert carried(directory).drops[0].keys == [key(1)]


def test_unwanted_pages_are_not_saved():
    directory = Directory([TierSpec("host", 2)], PrefixIndex(), 1024)
    directory.unwanted([key(1)])
    directory.evict(key(1), page=1)
    assert not directory.queued
    directory.evict(key(1), page=1)  # the next time it was wanted in between
    assert directory.queued


def test_costs_are_what_was_measured():
    costs = Costs(page_bytes=1000)
    assert costs.compute(10) is None and costs.move("host", "device", 1) is None
    costs.step(100, 1.0)
    costs.step(2, 5.0)  # says nothing about prompts
    costs.moved("host", "device", 10, 0.1)
    assert costs.compute(10) == pytest.approx(0.1) and costs.move("host", "device", 5) == pytest.approx(0.05)
    costs.decay("host", "device")
    assert costs.move("host", "device", 5) == pytest.approx(0.045)
    assert costs.rates()["tokens"] == pytest.approx(100)
