"""One suite for every store of pages: what is put is got, bit for bit, and nothing else ever is."""

import threading
import time

import numpy as np
import pytest
from redis_server import needs_server, redis_server

from quire.runtime.tiers.disk import DiskFolder, DiskTier
from quire.runtime.tiers.host import HostTier
from quire.runtime.tiers.redis import RemoteTier, connect, shared_secret
from quire.runtime.tiers.signed_page import PageSigner
from quire.types.fake_tiers import FakeTier
from quire.types.kv import KVGroup, KVLayout
from quire.types.transfer import TierJob

GROUP = KVGroup(layers=(0, 1), tokens_per_page=4, kv_heads=2, head_dim=8)
LAYOUT = KVLayout(groups=(GROUP,), dtype="float8_e4m3fn")
SIZE = LAYOUT.page_bytes


def key(i):
    return i % 2, bytes([i]) * 16


def page(i):
    return np.random.default_rng(i).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture(params=["fake", "host", "disk", pytest.param("remote", marks=needs_server)])
def tier(request, tmp_path):
    signal = threading.Event()
    signer = PageSigner(bytes(32), b"model", LAYOUT)
    if request.param == "remote":
        with redis_server(tmp_path) as (url, _):
            store = RemoteTier(connect(url), signer, signal)
            yield store
            store.close()
        return
    store = {
        "fake": FakeTier,
        "host": lambda: HostTier(8, SIZE, signal),
        "disk": lambda: DiskTier(DiskFolder(tmp_path / "kv"), signer, 1 << 20, signal),
    }[request.param]()
    yield store
    store.close()


def do(tier, kind, keys, buffers=None, job=1):
    tier.submit(TierJob(job, kind, keys, buffers))
    return ended(tier, job)


def ended(tier, job):
    for _ in range(2000):
        for done in tier.poll():
            if done.id == job:
                return done.done
        time.sleep(0.001)
    raise AssertionError("the job never ended")


def test_what_is_put_is_got(tier):
    keys = [key(i) for i in range(6)]
    assert do(tier, "put", keys, [page(i) for i in range(6)]) == [True] * 6
    into = [np.zeros(SIZE, np.uint8) for _ in range(3)]
    assert do(tier, "get", [key(4), key(1), key(7)], into) == [True, True, False]
    assert (into[0] == page(4)).all() and (into[1] == page(1)).all() and not into[2].any()
    assert do(tier, "find", [key(0), key(9)]) == [True, False]


def test_a_page_put_again_replaces_the_first(tier):
    do(tier, "put", [key(1)], [page(1)])
    assert do(tier, "put", [key(1)], [page(2)]) == [True]
    into = [np.zeros(SIZE, np.uint8)]
    assert do(tier, "get", [key(1)], into) == [True] and (into[0] == page(2)).all()


def test_what_is_dropped_is_gone(tier):
    do(tier, "put", [key(1), key(2)], [page(1), page(2)])
    assert do(tier, "drop", [key(1), key(3)]) == [True, False]
    assert do(tier, "find", [key(1), key(2)]) == [False, True]


def test_every_job_ends_even_when_cancelled(tier):
    for job in range(20):
        tier.submit(TierJob(job, "put", [key(job % 4)], [page(job)]))
        if job % 2:
            tier.cancel(job)
    seen = set()
    for _ in range(2000):
        seen |= {done.id for done in tier.poll()}
        if len(seen) == 20:
            break
        time.sleep(0.001)
    assert seen == set(range(20))


def test_scan_tells_what_is_there(tier):
    do(tier, "put", [key(1), key(2)], [page(1), page(2)])
    assert set(tier.scan()) == (set() if isinstance(tier, RemoteTier) else {key(1), key(2)})


def test_a_full_host_tier_refuses():
    store = HostTier(2, SIZE, threading.Event())
    assert do(store, "put", [key(i) for i in range(3)], [page(i) for i in range(3)]) == [True, True, False]
    store.close()


@needs_server
def test_engines_on_one_server_agree_on_a_secret(tmp_path):
    with redis_server(tmp_path) as (url, process):
        first = shared_secret(connect(url), b"a" * 32)
        assert first == shared_secret(connect(url), b"b" * 32) == b"a" * 32
        store = RemoteTier(connect(url), PageSigner(first, b"m", LAYOUT), threading.Event())
        assert do(store, "put", [key(1)], [page(1)]) == [True]
        process.kill()
        process.wait()
        into = [np.zeros(SIZE, np.uint8)]
        assert do(store, "get", [key(1)], into) == [False]  # an error, and from now on not even tried
        began = time.monotonic()
        assert do(store, "get", [key(1)], into) == [False] and time.monotonic() - began < 1
        store.close()
