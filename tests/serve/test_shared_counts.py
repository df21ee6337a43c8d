"""Limits that hold for several processes together, as long as each of them lives."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from quire.serve.core.api_keys import Key
from quire.serve.core.rate_limits import RequestAdmission
from quire.serve.core.shared_counts import SharedCounts
from quire.types.errors import OverloadedError, RateLimitError

ALICE, BOB = Key("alice"), Key("bob", tokens_per_minute=100)
KEYS = ("alice", "bob")

TAKES_ALL_IT_MAY = """
import sys
from pathlib import Path
from quire.serve.core.api_keys import Key
from quire.serve.core.rate_limits import RequestAdmission
from quire.serve.core.shared_counts import SharedCounts
from quire.types.errors import OverloadedError

counts = SharedCounts(["alice"], rows=3, row=int(sys.argv[2]), file=Path(sys.argv[1]))
admission = RequestAdmission(max_queue=1000, max_queue_tokens=1_000_000, key_concurrency=500, counts=counts)
print("ready", flush=True)
sys.stdin.readline()
granted = 0
for _ in range(500):
    try:
        admission.enter(Key("alice"))
        granted += 1
    except OverloadedError:
        pass
print(granted)
"""


def processes(file: Path, rows: int = 3, **limits: int) -> list[RequestAdmission]:
    """Of one server, as each of them sees the limits."""
    wide = {"max_queue": 1000, "max_queue_tokens": 1_000_000}
    each = [SharedCounts(KEYS, rows=rows, row=row, file=file) for row in range(rows)]
    return [RequestAdmission(**(wide | limits), counts=counts, clock=lambda: 100.0) for counts in each]


def test_what_one_let_in_counts_for_all(tmp_path: Path) -> None:
    main, first, second = processes(tmp_path / "counts", max_queue=3, max_queue_tokens=50, key_concurrency=2)
    permit = first.enter(ALICE)
    first.charge(permit, 40)
    second.enter(ALICE)
    with pytest.raises(RateLimitError, match="2 requests under way"):
        main.enter(ALICE)
    waits = second.enter(BOB)
    with pytest.raises(OverloadedError, match="3 requests are waiting"):
        main.enter(BOB)
    with pytest.raises(OverloadedError, match="holds 40 tokens"):
        second.charge(waits, 20)
    assert {(each.waiting, each.queued, each.inflight) for each in (main, first, second)} == {(3, 40, 3)}
    assert main.refused == {"key_concurrency": 1, "queue_full": 1, "queue_tokens": 1}
    first.start(permit)
    first.leave(permit)
    assert (main.waiting, main.queued, main.inflight) == (2, 0, 2)
    main.enter(ALICE)


def test_a_keys_tokens_are_spent_wherever_its_requests_go(tmp_path: Path) -> None:
    _, first, second = processes(tmp_path / "counts")
    permit = first.enter(BOB)
    first.charge(permit, 80)
    with pytest.raises(RateLimitError, match="100 tokens a minute"):
        second.charge(second.enter(BOB), 40)
    permit.used = 10
    first.leave(permit)  # what it did not use is there again
    second.charge(second.enter(BOB), 90)


def test_a_drain_is_everybodys(tmp_path: Path) -> None:
    main, first, _ = processes(tmp_path / "counts")
    main.draining = True
    with pytest.raises(OverloadedError, match="shutting down"):
        first.enter(ALICE)
    assert main.refused == {"draining": 1}


async def test_idle_is_when_no_process_has_anything_under_way(tmp_path: Path) -> None:
    main, first, _ = processes(tmp_path / "counts")
    permit = first.enter(ALICE)
    idle = asyncio.ensure_future(main.idle())
    done, _ = await asyncio.wait([idle], timeout=0.01)
    assert not done
    first.leave(permit)
    await asyncio.wait_for(idle, 10)


def test_what_a_process_that_died_had_is_taken_back(tmp_path: Path) -> None:
    main, first, second = processes(tmp_path / "counts", key_concurrency=2)
    for _ in range(2):
        first.charge(first.enter(ALICE), 10)
    with pytest.raises(RateLimitError):
        first.enter(ALICE)
    second.enter(BOB)
    main.counts.clear(1)
    assert (main.waiting, main.queued, main.inflight) == (1, 0, 1)
    assert main.refused == {"key_concurrency": 1}  # counters never go back
    again = processes(tmp_path / "counts", key_concurrency=2)[1]  # who follows counts on in its row
    for _ in range(2):
        again.enter(ALICE)
    assert second.inflight == 3


def test_no_two_processes_take_the_same_place(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TAKES_ALL_IT_MAY, str(tmp_path / "counts")]
    each = [
        subprocess.Popen([*command, str(row)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for row in (1, 2)
    ]
    for process in each:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in each:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert sum(int(process.communicate(timeout=60)[0]) for process in each) == 500


def test_a_process_that_is_stopped_while_it_decides_holds_nobody_up_for_long(tmp_path: Path) -> None:
    """Its lock is not waited for for ever."""
    holds = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+b'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    main, *_ = processes(tmp_path / "counts")
    command = [sys.executable, "-c", holds, str(tmp_path / "counts")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        main.enter(ALICE)
        assert main.inflight == 1
