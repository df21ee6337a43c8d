"""The ledger of a server whose requests several processes follow."""

from __future__ import annotations

import time

import msgspec
import pytest

from quire.observe.ledger import EntryReport, Ledger
from quire.observe.metrics import Metrics
from quire.types.outputs import Delta
from quire.types.request import FinishReason, Request
from quire.types.sampling_params import SamplingParams


def request(name: str) -> Request:
    return Request(id=name, prompt=[1, 2], params=SamplingParams(max_tokens=3))


def pass_on(worker: Ledger, main: Ledger, *, running: bool = False) -> list[str]:
    reports = msgspec.msgpack.decode(msgspec.msgpack.encode(worker.changes(running=running)), type=list[EntryReport])
    for report in reports:
        main.note(report)
    return [report.request for report in reports]


def test_another_process_is_told_what_came_ran_and_ended() -> None:
    worker, main, metrics = Ledger(reports=True), Ledger(), Metrics("m")
    with worker.watch(request("a"), time.perf_counter(), metrics, call="c", owner="alice") as meter:
        assert pass_on(worker, main) == ["a"]
        [entry] = main.find("c")
        assert (entry.owner, entry.ended, entry.meter.tokens) == ("alice", 0.0, 0)
        assert pass_on(worker, main) == []
        meter.deltas([Delta(branch=0, token_ids=[5, 6])])
        assert pass_on(worker, main, running=True) == ["a"]
        assert main.find("a")[0].meter.tokens == 2 and main.find("a")[0].meter.first
        meter.deltas([Delta(branch=0, token_ids=[7], finish_reason=FinishReason.LENGTH)])
    assert pass_on(worker, main) == ["a"] and pass_on(worker, main, running=True) == []
    [entry] = main.latest()
    assert entry.ended and entry.meter.reasons == ["length"] and entry.meter.tokens == 3


def test_what_a_lost_process_followed_is_over() -> None:
    worker, main, metrics = Ledger(reports=True), Ledger(), Metrics("m")
    with pytest.raises(ValueError), worker.watch(request("a"), time.perf_counter(), metrics):
        pass_on(worker, main)
        main.lose(["a", "unknown"], "api_worker_died")
        raise ValueError
    assert main.find("a")[0].error == "api_worker_died" and main.find("a")[0].ended
    pass_on(worker, main)
    assert main.find("a")[0].error == "ValueError"


def test_the_latest_come_first_whichever_process_told_first() -> None:
    one, other, main, metrics = Ledger(reports=True), Ledger(reports=True), Ledger(), Metrics("m")
    now = time.perf_counter()
    for worker, name, arrived in ((one, "a", now - 3), (other, "b", now - 2), (one, "c", now - 1)):
        with worker.watch(request(name), arrived, metrics):
            pass
    for worker in (one, other):
        pass_on(worker, main)
    assert [entry.request for entry in main.latest()] == ["c", "b", "a"]
