"""Losses of replicas, and whom they count against: the server, which gives up after too many, and requests, which may
be why.

A loss is taken back where the process was there all the while and joins again: it was the network's. Until that is
known, a request under which many were lost goes to no other. Refuses to know: links, how requests go on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from quire.cluster.active_request import ActiveRequest
from quire.engine.client import RESTART_WINDOW_S

MAX_FAILOVERS = 3  # replicas that may be lost under one request, which may be why, before it ends with an error
MAX_LINK_LOSSES = 16  # of the connections alone, that are not counted against a request


@dataclass(slots=True)
class ReplicaLoss:
    process: str
    at: float
    requests: set[ActiveRequest]  # that it had under way


class ReplicaLosses:
    def __init__(self, max_restarts: int):
        self._max_restarts = max_restarts
        self._times: list[float] = []
        self._latest: dict[int, ReplicaLoss] = {}  # by the replica's number

    def __len__(self) -> int:
        return len(self._times)

    def record(self, number: int, process: str, requests: set[ActiveRequest]) -> None:
        """A replica is lost; nothing is known of its process."""
        self._latest[number] = ReplicaLoss(process, self.record_failure(), requests)
        for active in requests:
            active.failovers += 1

    def record_failure(self) -> float:
        """A process failed before it was a replica."""
        now = time.monotonic()
        self._times = [then for then in self._times if now - then < RESTART_WINDOW_S] + [now]
        return now

    def take_back(self, number: int, process: str) -> float:
        """A process is ready as this replica, after so many seconds without one. Where it is the one that was lost, it
        never was; else that has ended."""
        loss = self._latest.pop(number, None)
        if loss is None:
            return 0.0
        if loss.process != process:
            for active in loss.requests:
                active.deaths += 1
        else:
            self._times = [then for then in self._times if then != loss.at]
            for active in loss.requests:
                active.link_losses += 1
                active.failovers -= active.link_losses <= MAX_LINK_LOSSES
        return time.monotonic() - loss.at

    def too_many(self, replicas: int) -> bool:
        return len(self._times) > (self._max_restarts + 1) * max(1, replicas)
