"""A real Redis or Valkey server on a free port, for as long as a test needs it."""

import shutil
import socket
import subprocess
import time
from contextlib import contextmanager

import pytest

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
# Where there is no server, `make test` leaves these tests out and `make test-all` fails.
needs_server = pytest.mark.slow if PROGRAM is None else pytest.mark.filterwarnings("default")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def redis_server(directory):
    """(url, process). Without a server installed the test fails: `apt-get install redis-server`, or valkey."""
    if PROGRAM is None:
        pytest.fail("the remote tier is tested against a real server; install redis-server or valkey")
    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(directory)]
    process = subprocess.Popen([PROGRAM, *options], stdout=subprocess.DEVNULL)
    try:
        import redis

        client = redis.Redis(port=port)
        for _ in range(200):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}/0", process
    finally:
        process.kill()
        process.wait()
