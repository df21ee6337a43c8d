"""Transfers between device pages and the stores below: begun in step order, done beside the steps.

    save   device ─(read at once)─► buffer ─► put        load   get ─► buffer ─► device        demote   get ─► put
    hand-over of what the step itself fills: as its layers are written (`layerwise_send.py`)

On a CPU a store reads straight into the device pages. On a GPU bytes go through pinned buffers, on a stream of their
own that first waits for what the steps before have read. Refuses to know: why a page moves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any, cast

import numpy as np
import torch

from quire.runtime.host_buffers import HostBuffers, HostRows
from quire.runtime.layerwise_send import LayerwiseSend, SenderThread
from quire.types.kv import KVLayout
from quire.types.plan import StepPlan
from quire.types.transfer import DEVICE, PEER, KVConnector, KVTier, TierDone, TierJob, Transfer, TransferDone

POLL_INTERVAL_S = 0.001  # while copies of a GPU are in flight


class Transfers:
    def __init__(self, stores: Mapping[str, KVTier], signal: threading.Event, layout: KVLayout):
        """`signal` is set by the stores when a job ends."""
        self._stores = stores
        self._layout = layout
        self._sender = SenderThread(self._send, self._not_sent)
        self._sending: set[int] = set()  # ids of transfers that the sender has, or will have as layers are written
        self._signal = signal
        self._lock = threading.RLock()
        self._ids = count(1)
        self._jobs: dict[tuple[str, int], Callable[[TierDone], None]] = {}  # jobs under transfer, and what follows them
        self._copies: list[tuple[Any, Callable[[], None]]] = []  # (event on the GPU, what follows it)
        self._done: list[TransferDone] = []

    def use(self, pages: torch.Tensor) -> None:
        """These are the device pages, uint8 [pages, page_bytes]."""
        self._pages = pages
        self._gpu = pages.device.type == "cuda"
        self._rows = None if self._gpu else pages.numpy()
        self._stream = torch.cuda.Stream(pages.device) if self._gpu else None
        self._buffers = HostBuffers(pages.shape[1], pinned=self._gpu)

    def start(self, plan: StepPlan) -> LayerwiseSend | None:
        """Begin a plan's transfers; nothing of the step itself may have begun. What is returned is to be told of its
        layers."""
        if not (plan.transfers or plan.drops):
            return None
        layerwise = [transfer for transfer in plan.transfers if transfer.layerwise]
        with self._lock, torch.inference_mode() if self._gpu else nullcontext():
            device = [one for one in plan.transfers if one.source == DEVICE and not one.layerwise]
            saves = [(transfer, self._take(transfer.pages)) for transfer in device]
            for transfer in plan.transfers:
                if transfer.source != DEVICE:
                    self._fetch(transfer)
            for drop in plan.drops:  # after what is read from there, before what is put there
                self._stores[drop.tier].submit(TierJob(next(self._ids), "drop", drop.keys, None, drop.handover))
            for transfer, (buffers, copied) in saves:
                if transfer.target == PEER:
                    self._sending.add(transfer.id)
                    job = TierJob(0, "put", transfer.keys, buffers, transfer.handover)
                    self._sender.put(job, copied, partial(self._sent_whole, transfer))
                elif copied is None:
                    self._put(transfer, buffers)
                else:
                    self._copies.append((copied, partial(self._put, transfer, buffers)))
            self._sending.update(transfer.id for transfer in layerwise)
        if not layerwise:
            return None
        return LayerwiseSend(layerwise, self._layout, self._take, self._sender.put, self._end_sent)

    def _send(self, job: TierJob, after: Callable[[TierDone], None]) -> None:
        """On the sender's thread: the connector takes jobs from any."""
        job.id = next(self._ids)
        self._jobs[PEER, job.id] = after
        try:
            self._stores[PEER].submit(job)
        except BaseException:
            del self._jobs[PEER, job.id]
            raise
        self._buffers.give_back(job.buffers)

    def _not_sent(self, job: TierJob, after: Callable[[TierDone], None]) -> None:
        """The peer is told, which would wait else. Its buffers are not kept: the GPU may still be writing to them."""
        self._stores[PEER].submit(TierJob(next(self._ids), "drop", job.keys, None, job.handover))
        after(TierDone(0, [False] * len(job.keys), 0.0))

    def _end_sent(self, transfer: Transfer, moved: list[bool], seconds: float) -> None:
        with self._lock:
            self._sending.discard(transfer.id)
            self._end(transfer, moved, seconds)
        self._signal.set()

    def poll(self, wait: float = 0.0) -> list[TransferDone]:
        """Transfers that have ended; waits so many seconds for the first."""
        deadline = time.monotonic() + wait
        while True:
            with self._lock:
                self._signal.clear()
                self._advance()
                done, self._done = self._done, []
                left = deadline - time.monotonic()
                if done or left <= 0 or not self._under_way:
                    return done
                pause = min(left, POLL_INTERVAL_S) if self._copies else left
            self._signal.wait(pause)

    @property
    def _under_way(self) -> bool:
        return bool(self._jobs or self._copies or self._sending)

    def drain(self) -> None:
        """Finish what is under transfer; poll() returns it later."""
        ended: list[TransferDone] = []
        while self._under_way:
            ended += self.poll(1.0)
        self._done += ended

    def close(self) -> None:
        if PEER in self._stores:
            cast(KVConnector, self._stores[PEER]).stop_sending()
        self.drain()
        self._sender.close()
        for store in self._stores.values():
            store.close()

    def _advance(self) -> None:
        for name, store in self._stores.items():
            for done in store.poll():
                follow = self._jobs.pop((name, done.id), None)
                if follow is not None:  # a drop has none
                    follow(done)
        waiting, self._copies = self._copies, []
        for event, after in waiting:
            if event.query():
                after()
            else:
                self._copies.append((event, after))

    def _submit(
        self, tier: str, kind: str, transfer: Transfer, buffers: Any, after: Callable[[TierDone], None]
    ) -> None:
        job = TierJob(next(self._ids), kind, transfer.keys, buffers, transfer.handover)
        self._jobs[tier, job.id] = after
        self._stores[tier].submit(job)

    def _end(self, transfer: Transfer, moved: list[bool], seconds: float) -> None:
        self._done.append(TransferDone(transfer.id, moved, seconds))

    def _sent_whole(self, transfer: Transfer, done: TierDone) -> None:
        self._end_sent(transfer, done.done, done.seconds)

    def _put(self, transfer: Transfer, buffers: list[np.ndarray]) -> None:
        def ended(done: TierDone) -> None:
            self._buffers.give_back(buffers)
            self._end(transfer, done.done, done.seconds)

        self._submit(transfer.target, "put", transfer, buffers, ended)

    def _fetch(self, transfer: Transfer) -> None:
        """Begin to read pages from a store, for the device or for another store."""
        if not transfer.target:
            self._submit(
                transfer.source, "find", transfer, None, lambda done: self._end(transfer, done.done, done.seconds)
            )
        elif transfer.target == DEVICE and self._rows is not None:
            buffers = [self._rows[page] for page in transfer.pages]
            self._submit(
                transfer.source, "get", transfer, buffers, lambda done: self._end(transfer, done.done, done.seconds)
            )
        else:
            staged = self._buffers.take(len(transfer.keys), self._pages.shape[1])
            free = self._mark() if self._gpu else None
            follow = self._fill if transfer.target == DEVICE else self._relay
            self._submit(transfer.source, "get", transfer, staged, lambda done: follow(transfer, staged, free, done))

    def _relay(self, transfer: Transfer, staged: HostRows, free: Any, got: TierDone) -> None:
        """From one store into the next."""
        found = got.done
        some = Transfer(
            transfer.id, transfer.source, transfer.target, [k for k, ok in zip(transfer.keys, found, strict=True) if ok]
        )
        pages = [page for page, ok in zip(staged, found, strict=True) if ok]

        def end(done: TierDone) -> None:
            self._buffers.give_back(staged)
            stored = iter(done.done)
            self._end(transfer, [ok and next(stored) for ok in found], got.seconds + done.seconds)

        self._submit(transfer.target, "put", some, pages, end)

    # ---- on a GPU -------------------------------------------------------------------------------------------

    def _mark(self) -> Any:
        event = torch.cuda.Event()
        event.record()
        return event

    def _take(self, pages: list[int], start: int = 0, stop: int | None = None) -> tuple[list[np.ndarray], Any]:
        """Read device pages, or these bytes of each, as they are now, into buffers; and the event after which these
        hold them."""
        if self._rows is not None:
            return list(self._rows[:, start:stop][pages]), None
        index = torch.tensor(pages, pin_memory=True).to(self._pages.device, non_blocking=True)
        with torch.inference_mode():  # buffers that were made in it can be written to in it only
            return self._copied(self._pages[:, start:stop][index])

    def _copied(self, taken: torch.Tensor) -> tuple[HostRows, Any]:
        rows = self._buffers.take(*taken.shape)
        assert self._stream is not None
        self._stream.wait_event(self._mark())
        with torch.cuda.stream(self._stream):
            for part, content in zip(rows.parts, taken.split(len(rows.parts[0])), strict=True):
                part.copy_(content, non_blocking=True)
            taken.record_stream(self._stream)
            return rows, self._mark()

    def _fill(self, transfer: Transfer, staged: HostRows, free: Any, got: TierDone) -> None:
        """Copy what a store delivered into device pages, once the steps that used them are over."""
        began = time.monotonic()
        assert self._stream is not None
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._stream.wait_event(free)
            first = 0
            for part in staged.parts:
                came = [i for i, ok in enumerate(got.done[first : first + len(part)]) if ok]
                if came:
                    into = torch.tensor([transfer.pages[first + i] for i in came], pin_memory=True)
                    arrived = part.to(self._pages.device, non_blocking=True)
                    arrived = arrived if len(came) == len(part) else arrived[came]
                    self._pages[into.to(self._pages.device, non_blocking=True)] = arrived
                first += len(part)
            copied = self._mark()

        def ended() -> None:
            self._buffers.give_back(staged)
            self._end(transfer, got.done, got.seconds + time.monotonic() - began)

        self._copies.append((copied, ended))
