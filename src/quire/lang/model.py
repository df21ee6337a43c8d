"""`Model`: where prompts begin. It has a loop that works while the caller's own Python goes on.

    Model("smollm2-135m", kv_memory="1G")     an engine in this process, with its options
    Model(llm)                                an LLM that exists; its own methods rest meanwhile
    Model(async_llm)                          an AsyncLLM or Frontend, on the loop it lives on
    Model("http://127.0.0.1:8000")            a Quire server, or another that speaks OpenAI's API

Refuses to know: what prompts are made of.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Protocol, TypeVar

from quire.engine.frontend import AsyncLLM, Frontend
from quire.lang.backend import Backend, InProcess
from quire.lang.pieces import Piece
from quire.lang.prompt import Prompt
from quire.lang.state import State
from quire.types.errors import InputError

T = TypeVar("T")
R = TypeVar("R")
WORKERS = 32


class Shareable(Protocol):
    """An engine that can be lent to a loop, as an LLM can."""

    def shared(self) -> AbstractAsyncContextManager[Frontend]: ...


class Model:
    """Ready to be added to. A context manager: closing it ends what is under way, and the engine it opened itself."""

    def __init__(self, target: str | Frontend | Shareable = "smollm2-135m", **options: Any):
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closers = AsyncExitStack()
        self._thread: threading.Thread | None = None
        if isinstance(target, Frontend):
            self._loop = asyncio.get_running_loop()
            self.backend: Backend = InProcess(target)
            return
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-lang", daemon=True)
        self._thread.start()
        try:
            self.backend = self._run(self._closers.enter_async_context(_opened(target, options)))
        except BaseException:
            self._end()
            raise

    # ---- prompts -----------------------------------------------------------------------------------------------

    @property
    def prompt(self) -> Prompt:
        """An empty prompt."""
        begun: Future[State] = Future()
        begun.set_result(State())
        return Prompt(self, begun)

    def __add__(self, piece: Piece) -> Prompt:
        return self.prompt + piece

    def map(self, program: Callable[[Model, T], R], items: Iterable[T], workers: int = WORKERS) -> list[R]:
        """`program(model, item)` for all items at once, up to `workers` of them; results in their order."""
        with ThreadPoolExecutor(workers, thread_name_prefix="quire-lang-map") as pool:
            return list(pool.map(lambda item: program(self, item), items))

    # ---- the loop ----------------------------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(self._followed(work), self._loop)

    def wait(self, future: Future[T]) -> T:
        if not future.done() and self._here():
            raise InputError("this would wait for the event loop it runs on; `await prompt` before reading it")
        return future.result()

    async def _followed(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await task

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _here(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    # ---- the end -----------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """End what is under way; for a Model on the caller's own loop."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._closers.aclose()

    def close(self) -> None:
        if self._thread is None:
            raise InputError("this Model lives on your event loop: `await model.aclose()`")
        if self._thread.is_alive():
            try:
                self._run(self.aclose())
            finally:
                self._end()

    def _end(self) -> None:
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Model:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


@asynccontextmanager
async def _opened(target: str | Shareable, options: dict[str, Any]) -> AsyncIterator[Backend]:
    if not isinstance(target, str):
        async with target.shared() as frontend:
            yield InProcess(frontend)
    elif target.startswith(("http://", "https://")):
        from quire.lang.http_backend import connected

        async with connected(target, **options) as server:
            yield server
    else:
        async with await AsyncLLM.open(target, **options) as llm:
            yield InProcess(llm)
