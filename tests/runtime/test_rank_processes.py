"""The processes of an engine's other ranks, as rank 0 sees them."""

import threading
from types import SimpleNamespace

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
