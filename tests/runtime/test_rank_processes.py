"""The processes of an engine's other ranks, as rank 0 sees them."""

import threading
from multiprocessing import Pipe
from types import SimpleNamespace

import msgspec
import pytest

from quire.runtime.executors.rank_messages import RankFailed
from quire.runtime.executors.rank_processes import RankProcesses


def error_of(processes, *said):
    """What rank 0 makes of the end of others, one of which says this."""
    ours, theirs = Pipe()
    for reason in said:
        theirs.send_bytes(msgspec.msgpack.encode(RankFailed(reason)))
        processes._links.append(ours)
    try:
        return str(processes.error("RuntimeError: Connection closed by peer"))
    finally:
        processes._links.clear()
        processes.close()


@pytest.mark.parametrize("said", [(), ("RuntimeError: Connection closed by peer",)], ids=["rank 0", "another rank"])
def test_a_broken_connection_is_put_down_to_the_rank_that_died(said):
    """Connections of a process break before its end is known, and whoever was connected may say so first."""
    processes = RankProcesses([])
    ended = threading.Event()
    dying = SimpleNamespace(pid=77, wait=lambda: ended.wait() and -9)
    watch = threading.Thread(target=processes._watch, args=(1, dying))
    watch.start()
    threading.Timer(0.05, ended.set).start()
    assert error_of(processes, *said) == "a rank failed: rank 1 (process 77) was ended by signal 9"
    watch.join()


def test_what_a_rank_says_of_its_own_end_is_the_cause():
    processes = RankProcesses([])
    processes._watch(2, SimpleNamespace(pid=78, wait=lambda: 1))
    assert error_of(processes, "no memory is left") == "a rank failed: no memory is left"
