"""Off the loop and within limits: the prepare_pool, the lag it keeps low, and how lag is measured."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest

from quire.serve.core import prepare_pool
from quire.serve.core.loop_lag import LagMonitor
from quire.serve.core.prepare_pool import BACKLOG, INLINE_SIZE, PreparePool, off_loop
from quire.serve.http.bounded_server import SWITCH_INTERVAL
from quire.types.errors import InputError, OverloadedError


async def test_small_work_stays_and_large_work_goes() -> None:
    shop = PreparePool(1, 10.0)
    prepare_pool.enter(shop)
    here = threading.get_ident()
    assert await off_loop(INLINE_SIZE, threading.get_ident) == here
    assert await off_loop(INLINE_SIZE + 1, threading.get_ident) != here
    with pytest.raises(KeyError):
        await off_loop(INLINE_SIZE + 1, lambda: {}["missing"])
    await asyncio.sleep(0)
    assert shop.pending == 0
    shop.close()


async def test_work_that_hardly_had_a_processor_is_not_the_callers_fault() -> None:
    shop = PreparePool(1, 0.1)
    go = threading.Event()
    with pytest.raises(OverloadedError, match="in time"):
        await shop.run(lambda: go.wait(30))
    go.set()
    shop.close()


async def test_slow_work_is_given_up_on_and_late_work_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = PreparePool(1, 0.2)
    go = threading.Event()
    monkeypatch.setattr(prepare_pool, "_processor_time", lambda thread, since: 0.2)
    slow = asyncio.ensure_future(shop.run(lambda: go.wait(30)))
    behind = asyncio.ensure_future(shop.run(lambda: 1))
    with pytest.raises(InputError, match=r"took more than 0\.2 s"):
        await slow
    with pytest.raises(OverloadedError, match="in time"):
        await behind
    assert shop.pending >= 1  # a thread cannot be killed: it still counts
    go.set()
    async with asyncio.timeout(10):
        while shop.pending:
            await asyncio.sleep(0.01)
    assert await shop.run(lambda: 2) == 2
    shop.close()


async def test_the_backlog_is_bounded() -> None:
    shop = PreparePool(1, 30.0)
    go = threading.Event()
    jobs = [asyncio.ensure_future(shop.run(go.wait)) for _ in range(BACKLOG)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="too many"):
        await shop.run(lambda: 1)
    go.set()
    assert all(await asyncio.gather(*jobs))
    shop.close()


async def test_lag_is_seen() -> None:
    monitor = LagMonitor()
    task = asyncio.ensure_future(monitor.run())
    await asyncio.sleep(0.1)
    time.sleep(0.3)
    await asyncio.sleep(0.1)
    task.cancel()
    assert monitor.percentile(1.0) > 0.2
    assert monitor.cumulative()[-1] == ("+Inf", len(monitor.recent))
    assert LagMonitor().percentile(0.99) == 0.0


async def test_large_prompts_do_not_hold_up_the_loop(default_model) -> None:
    """The bound is wide, for busy machines; on the loop itself each of these would hold it up for a tenth of a second
    or more, and the middle of the measurements would show it."""
    from quire.text import TextModel

    text = TextModel.load(default_model)
    prompt = [{"role": "user", "content": "What is naïve about 日本語? " * 20_000}]
    text.encode_chat(prompt)  # compiles the template
    shop, monitor = PreparePool(2, 60.0), LagMonitor()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    measuring = asyncio.ensure_future(monitor.run())
    try:
        counts = await asyncio.gather(*(shop.run(lambda: len(text.encode_chat(prompt))) for _ in range(6)))
    finally:
        measuring.cancel()
        sys.setswitchinterval(interval)
    assert len(set(counts)) == 1 and counts[0] > 100_000
    assert len(monitor.recent) > 5 and monitor.percentile(0.5) < 0.05
    shop.close()
