"""An API worker: `python -m quire.serve.workers.api_worker CONTROL WAY PARENT-PID DIRECTORY`.

It takes connections that the main process accepted, answers what needs nothing but the engine over a connection of its
own to that, and passes on the rest. What to serve it is told over CONTROL, connections come over WAY; both are
descriptors that it inherits. It ends when told to, or with its parent.
Refuses to know: other workers, how the engine started.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import time
from pathlib import Path

from quire.assets import LocalModel
from quire.engine.client import RestartPolicy
from quire.engine.frontend import Frontend
from quire.engine.model_pool import ModelPool
from quire.engine.worker_client import EnginePlaces, WorkerClient
from quire.serve.core.api_keys import KeyRing
from quire.serve.core.context import current
from quire.serve.core.server_state import Serving
from quire.serve.core.shared_counts import SharedCounts
from quire.serve.http.app import create_serving, create_worker_app
from quire.serve.http.bounded_server import Server, run_loop
from quire.serve.workers import control
from quire.serve.workers.connections import Receiver
from quire.serve.workers.supervisor import MAIN_SOCKET, counts_in
from quire.text import TextModel
from quire.types.errors import QuireError, to_wire
from quire.types.logs import configure_child
from quire.types.memory_use import resident_bytes
from quire.types.messages import AdapterInfo
from quire.types.parent_watch import end_with_parent

BEAT_INTERVAL_S = 0.25
ORPHAN_S = 2.0  # without the main process
REPORT_INTERVAL_S = 0.5  # what is counted between two is lost with a worker that is killed


class ApiWorker:
    def __init__(self, way: socket.socket, directory: Path):
        self._way = way
        self._directory = directory
        self._channel = control.Channel[control.ToWorker](control.ToWorker, self._hear, self._orphaned)
        self._start: asyncio.Future[control.Start] = asyncio.get_running_loop().create_future()
        self._places = EnginePlaces()
        self._adapters: list[AdapterInfo] = []
        self._client: WorkerClient | None = None
        self._serving: Serving | None = None
        self._server: Server | None = None
        self._ending: asyncio.Task[None] | None = None

    async def run(self, end: socket.socket) -> None:
        await self._channel.open(end)
        start = await self._start
        configure_child("api", request_id=lambda: current().request_id, worker=str(start.number))
        keys = KeyRing(start.keys)
        counts = counts_in(self._directory, keys, rows=start.rows, row=start.number)
        beating = asyncio.create_task(_beat(counts))
        try:
            serving = self._serving = await self._build(start, keys, counts)
        except QuireError as error:
            self._channel.send(control.Unable(*to_wire(error)))
            return
        beside = [beating, *map(asyncio.create_task, (serving.lag.run(), self._report_now_and_then(serving)))]
        await self._serve(serving, counts)
        for task in beside:
            task.cancel()
        self._report(serving, 0)
        serving.prepare_pool.close()
        await serving.models.close()

    async def _build(self, start: control.Start, keys: KeyRing, counts: SharedCounts) -> Serving:
        options = start.options
        local = LocalModel(start.model_name, Path(start.files), start.kind)
        parsers = {"tool_call_parser": options.tool_call_parser, "reasoning_parser": options.reasoning_parser}
        opening = asyncio.create_task(WorkerClient.follow(self._places, RestartPolicy(options.heartbeat)))
        text = await asyncio.to_thread(TextModel.load, local, **parsers)
        self._client = client = await opening
        client.adapters = self._adapters
        pool = ModelPool.of(Frontend(client, text, start.model_name))
        return create_serving(pool, options, keys, counts=counts, is_worker=True)

    async def _serve(self, serving: Serving, counts: SharedCounts) -> None:
        """Until told to stop."""
        app = create_worker_app(serving, self._directory / MAIN_SOCKET)
        server = self._server = Server(app, serving.options)
        answering = asyncio.create_task(server.serve([]))
        await server.up.wait()
        receiver = Receiver(self._way, server.new_protocol, counts, server.config.ssl)
        gc.collect()
        gc.freeze()  # what lives now stays: no stream waits while it is searched for garbage
        self._channel.send(control.Up())
        await answering
        receiver.close()

    # ---- what the main process says -------------------------------------------------------------------------

    def _hear(self, message: control.ToWorker) -> None:
        match message:
            case control.Start():
                self._start.set_result(message)
            case control.EngineComes(path):
                self._places.comes_to(Path(path))
            case control.EngineLost(why):
                self._places.lost(why)
            case control.AdaptersAre(adapters):
                self._adapters = adapters
                if self._client is not None:
                    self._client.adapters = adapters
            case control.Tell(number):
                if self._serving is not None:
                    self._report(self._serving, number)
            case control.CutOff():
                if self._serving is not None:
                    self._ending = asyncio.ensure_future(self._serving.models.close())
            case control.Stop():
                self._stop()

    def _stop(self) -> None:
        if self._server is None:
            os._exit(0)  # nothing has begun
        self._server.should_exit = True

    def _orphaned(self) -> None:
        """The main process is gone, which `end_with_parent` finds too and tidies up, or wants no more of this one."""
        asyncio.get_running_loop().call_later(ORPHAN_S, os._exit, 1)

    # ---- what it is told ------------------------------------------------------------------------------------

    async def _report_now_and_then(self, serving: Serving) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            self._report(serving, 0)

    def _report(self, serving: Serving, number: int) -> None:
        lag, lag_total = serving.lag.take()
        requests = serving.ledger.changes(running=number > 0)
        preparing, memory = serving.prepare_pool.pending, resident_bytes()
        told = control.Report(number, serving.metrics.take(), requests, lag, lag_total, preparing, memory)
        self._channel.send(told)


async def _beat(counts: SharedCounts) -> None:
    while True:
        counts.put("beat", time.monotonic())
        await asyncio.sleep(BEAT_INTERVAL_S)


def main(control_end: str, way: str, parent: str, directory: str) -> int:
    configure_child("api")
    for number in (signal.SIGINT, signal.SIGTERM):  # the main process decides when to stop, and drains first
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(int(parent), Path(directory))

    async def work() -> None:
        worker = ApiWorker(socket.socket(fileno=int(way)), Path(directory))
        await worker.run(socket.socket(fileno=int(control_end)))

    run_loop(work())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
