"""Requests that nobody waits for: answered under the key that ordered them, behind what callers wait for, patiently.

Refuses to know: where requests come from and where answers go.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeVar

from quire.serve.core import prepare_pool
from quire.serve.core.api_keys import OPEN_KEY, Key
from quire.serve.core.context import Context, enter
from quire.serve.core.generation import Serving
from quire.serve.http.auth import own_place, salt_of
from quire.types.errors import EngineDeadError, InputError, OverloadedError

T = TypeVar("T")
A = TypeVar("A")

MAX_DEATHS = 10  # engines a request may lose before it is given up


def act_for(serving: Serving, owner: str, id: str) -> None:
    """Go on in the name of the key that ordered the work, not of the request that did."""
    keys = serving.keys
    known: dict[str, Key] = {OPEN_KEY.name: OPEN_KEY} if keys.open else {key.name: key for key in keys.keys}
    if (key := known.get(owner)) is None:
        raise InputError("the key that ordered the batch is not known any more", code="key_removed")
    enter(Context(id, key, salt_of(serving, key), strict_fields=serving.options.strict_fields))
    prepare_pool.enter(serving.prepare_pool)


async def patiently(serving: Serving, answer: Callable[[Serving, bytes], Awaitable[bytes]], raw: bytes) -> bytes:
    """The answer, however long it takes to get a turn: what bounds that is the batch's window."""
    deaths = 0
    while True:
        try:
            with own_place(serving):
                return await answer(serving, raw)
        except OverloadedError as error:
            await asyncio.sleep(error.retry_after)
        except EngineDeadError as error:
            deaths += 1
            if deaths > MAX_DEATHS:
                raise
            await asyncio.sleep(error.retry_after)


async def side_by_side(
    requests: AsyncIterator[T], answer: Callable[[T], Awaitable[A]], at_once: Callable[[], int]
) -> AsyncGenerator[A, None]:
    """Answers in the order they are ready, so many under way as `at_once` says then. Closing it ends them all."""
    pending: set[asyncio.Future[A]] = set()
    more = True
    try:
        while more or pending:
            while more and len(pending) < at_once():
                request = await anext(requests, None)
                if request is None:
                    more = False
                else:
                    pending.add(asyncio.ensure_future(answer(request)))
            if pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
