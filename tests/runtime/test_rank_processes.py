"""The processes of an engine's other ranks, as rank 0 sees them."""

import threading
from multiprocessing import Pipe
from types import SimpleNamespace

import msgspec

from quire.runtime.executors.rank_messages import RankFailed
from quire.runtime.executors.rank_processes import RankProcesses


def test_a_broken_connection_is_put_down_to_the_rank_that_died():
    processes = RankProcesses([])
    ended = threading.Event()
    dying = SimpleNamespace(pid=77, wait=lambda: ended.wait() and -9)
    watch = threading.Thread(target=processes._watch, args=(1, dying))
    watch.start()
    threading.Timer(0.05, ended.set).start()  # connections of a process break before its end is known
    error = processes.error("RuntimeError: Connection closed by peer")
    watch.join()
    processes.close()
    assert str(error) == "a rank failed: rank 1 (process 77) was ended by signal 9"


def test_a_rank_that_lost_another_is_not_the_cause():
    """What it says comes before the end of the other is known."""
    processes = RankProcesses([])
    ended = threading.Event()
    dying = SimpleNamespace(pid=77, wait=lambda: ended.wait() and -9)
    watch = threading.Thread(target=processes._watch, args=(1, dying))
    watch.start()
    ours, theirs = Pipe()
    processes._links.append(ours)
    theirs.send_bytes(msgspec.msgpack.encode(RankFailed("RuntimeError: Connection closed by peer")))
    threading.Timer(0.05, ended.set).start()
    error = processes.error("it does not listen any more")
    watch.join()
    processes._links.clear()
    processes.close()
    assert str(error) == "a rank failed: rank 1 (process 77) was ended by signal 9"


def test_what_a_rank_says_of_its_own_end_is_the_cause():
    processes = RankProcesses([])
    processes._watch(2, SimpleNamespace(pid=78, wait=lambda: 1))
    ours, theirs = Pipe()
    processes._links.append(ours)
    theirs.send_bytes(msgspec.msgpack.encode(RankFailed("no memory is left")))
    error = processes.error("it does not listen any more")
    processes._links.clear()
    processes.close()
    assert str(error) == "a rank failed: no memory is left"
