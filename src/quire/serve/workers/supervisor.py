"""The API workers of a server and the main process over them, which owns the engine, accepts connections, and answers
what is one for the whole server.

    clients ──► main: accept ──connection──► worker ──frames──► engine
                  ▲    ▲                     │   │
                  │    └── what it counted ──┘   └── files, batches, metrics ...: HTTP over a unix socket ──► main
                  └ admin API, gRPC

One that dies, or gives no sign of life for too long, is replaced; its requests end, its counts are taken back, and the
others do not notice. All end with the main process, however that ends.
Refuses to know: routes, what a worker does with a connection.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.client import AsyncClient
from quire.serve.core.api_keys import OPEN_KEY, KeyRing
from quire.serve.core.shared_counts import SharedCounts
from quire.serve.workers import control
from quire.serve.workers.connections import Acceptor
from quire.serve.workers.worker_process import WorkerProcess
from quire.types.errors import ConfigError
from quire.types.serving import ServeOptions

if TYPE_CHECKING:
    from quire.serve.core.server_state import Serving

logger = logging.getLogger("quire.serve")

MAIN_SOCKET = "main.sock"
COUNTS = "counts"
FIRST_BACKOFF_S = 0.25  # before a worker that died is replaced; one that follows soon waits twice as long
MAX_BACKOFF_S = 10.0
STEADY_S = 30.0  # that a worker lived, after which its end is not one of a row
WATCH_INTERVAL_S = 0.5  # between looks for signs of life
REPORT_TIMEOUT_S = 1.0  # that a worker has to say what it counted
END_TIMEOUT_S = 4.0  # that a worker has to end when told


def counts_in(directory: Path, keys: KeyRing, *, rows: int, row: int = 0) -> SharedCounts:
    """What the processes of a server count together; row 0 is the main process's."""
    names = [OPEN_KEY.name, *(key.name for key in keys.keys)]
    return SharedCounts(names, rows=rows, row=row, file=directory / COUNTS)


class ApiWorkers:
    def __init__(self, options: ServeOptions, keys: KeyRing):
        self.directory = Path(tempfile.mkdtemp(prefix="quire-"))  # mode 0700
        self.restarts = 0
        self._options = options
        self._keys = keys
        self.counts = counts_in(self.directory, keys, rows=1 + options.api_workers)
        self.listener = socket.socket(socket.AF_UNIX)  # for what workers pass on
        self.listener.bind(str(self.directory / MAIN_SOCKET))
        self.listener.listen()
        self._workers: dict[int, WorkerProcess] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._acceptor: Acceptor | None = None
        self._asked, self._engine_sockets = itertools.count(1), itertools.count(1)
        self._engine_alive = True
        self._ending = asyncio.Event()

    # ---- what the main process may ask ----------------------------------------------------------------------

    @property
    def up(self) -> int:
        return sum(worker.ready for worker in self._workers.values())

    @property
    def preparing(self) -> int:
        return sum(worker.preparing for worker in self._workers.values())

    async def refresh(self) -> None:
        """Have all that workers counted until now counted here; of one that does not answer, until it last did."""
        number = next(self._asked)
        asked = [worker.ask(number) for worker in self._takers()]
        if asked:
            await asyncio.wait(asked, timeout=REPORT_TIMEOUT_S)

    # ---- their life -----------------------------------------------------------------------------------------

    async def start(self, serving: Serving, listener: socket.socket) -> None:
        """Returns when all answer; raises what keeps one from it."""
        self._serving = serving
        frontend = serving.frontend
        if not isinstance(frontend.client, AsyncClient) or frontend.text.files is None:
            raise ConfigError("api_workers need an engine process and a model's files; leave the option out")
        self._client, self._files = frontend.client, frontend.text.files
        self._engine_alive, self._client.on_change = self._client.alive, self._engine_changed
        first = [asyncio.get_running_loop().create_future() for _ in range(self._options.api_workers)]
        self._tasks = [asyncio.create_task(self._keep(number, up)) for number, up in enumerate(first, 1)]
        self._tasks.append(asyncio.create_task(self._watch()))
        await asyncio.gather(*first)
        self._acceptor = Acceptor(listener, self._takers, self._options.max_connections)

    def _takers(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers.values() if worker.ready and not self._silent(worker)]

    async def _keep(self, number: int, first: asyncio.Future[None]) -> None:
        """One worker after the other, in one row of the counts."""
        pause = 0.0
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                worker = await self._launch(number)
                await asyncio.wait([worker.up])
                error = worker.up.exception()
                if not first.done():
                    first.set_result(None) if error is None else first.set_exception(error)
                how = await worker.ended()
                if error is not None:
                    how = str(error)
            except Exception as error:
                if not first.done():
                    first.set_exception(error)
                how = str(error)
            self._forget(number)
            if self._ending.is_set():
                return
            steady = time.monotonic() - began > STEADY_S
            pause = FIRST_BACKOFF_S if steady else min(max(FIRST_BACKOFF_S, 2 * pause), MAX_BACKOFF_S)
            self.restarts += 1
            logger.error("API worker %d is lost (%s), another starts in %.2f s", number, how, pause)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)

    async def _launch(self, number: int) -> WorkerProcess:
        files = self._files
        start = control.Start(
            number=number,
            model_name=self._serving.frontend.model_name,
            files=str(files.path),
            kind=files.kind,
            options=self._options,
            keys=self._keys.keys,
            rows=self.counts.rows,
        )
        worker = self._workers[number] = WorkerProcess(number, self.directory, self.counts, start, self._on_report)
        await worker.connect()
        if self._client.alive:
            self._let_engine_come(worker)
        return worker

    def _forget(self, number: int) -> None:
        """Its process is gone, and with it what it had under way."""
        worker = self._workers.pop(number, None)
        if worker is None:
            return
        worker.kill()  # one that could not be spoken to
        self._client.detach_client(worker.name)
        self.counts.clear(number)
        self._serving.ledger.lose(worker.requests, "api_worker_died")

    async def _watch(self) -> None:
        """End workers that hang."""
        limit = self._options.hang_timeout
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            for worker in self._workers.values():
                if limit and (silent := self._silence(worker)) > limit:
                    worker.kill(f"it gave no sign of life for {silent:.0f} s and was ended")

    def _silence(self, worker: WorkerProcess) -> float:
        beat = self.counts.of_row(worker.number, "beat") or worker.began
        return time.monotonic() - beat

    def _silent(self, worker: WorkerProcess) -> bool:
        return self._silence(worker) > self._options.heartbeat

    # ---- the engine -----------------------------------------------------------------------------------------

    def _let_engine_come(self, worker: WorkerProcess) -> None:
        path = self.directory / f"engine-{next(self._engine_sockets)}.sock"
        worker.send(control.AdaptersAre(self._client.adapters))
        worker.send(control.EngineComes(str(path)))
        self._client.attach_client(worker.name, path)

    def _engine_changed(self) -> None:
        """It is lost, or another, or has other adapters."""
        was, alive = self._engine_alive, self._client.alive
        self._engine_alive = alive
        for worker in self._workers.values():
            if alive and not was:
                self._let_engine_come(worker)
            elif alive:
                worker.send(control.AdaptersAre(self._client.adapters))
            elif was:
                worker.send(control.EngineLost("its process is gone"))

    # ---- what they count ------------------------------------------------------------------------------------

    def _on_report(self, worker: WorkerProcess, report: control.Report) -> None:
        serving = self._serving
        metrics = serving.metrics
        metrics.add(report.counted)
        serving.lag.add(report.lag, report.lag_total)
        for entry in report.requests:
            serving.ledger.note(entry)
            (worker.requests.discard if entry.ended else worker.requests.add)(entry.request)
        worker.preparing, worker.memory = report.preparing, report.memory
        metrics.workers_memory = sum(each.memory for each in self._workers.values())

    # ---- the end --------------------------------------------------------------------------------------------

    def cut_off(self) -> None:
        """End what is open, each with an error that its client can read."""
        for worker in self._workers.values():
            worker.send(control.CutOff())

    async def stop(self) -> None:
        """Nothing is open any more: no connections are accepted, and all workers end."""
        self._ending.set()
        if self._acceptor is not None:
            self._acceptor.close()
        for worker in self._workers.values():
            if worker.ready:
                worker.send(control.Stop())
            else:
                worker.kill()
        keeping, watching = self._tasks[:-1], self._tasks[-1:]
        if keeping:
            await asyncio.wait(keeping, timeout=END_TIMEOUT_S)
        for worker in self._workers.values():
            worker.kill()
        for task in (*keeping, *watching):
            task.cancel()
        await asyncio.gather(*keeping, *watching, return_exceptions=True)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        self.listener.close()
        shutil.rmtree(self.directory, ignore_errors=True)
