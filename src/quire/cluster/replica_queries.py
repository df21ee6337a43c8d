"""Questions that a cluster's client asks all replicas at once, and their answers as one.

Refuses to know: requests, routing.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from contextlib import suppress
from typing import TypeVar

from msgspec.structs import replace

from quire.cluster.aggregation import merge_reports, merge_views, sum_stats
from quire.cluster.pending_requests import NO_REPLICA
from quire.cluster.replica_handle import Replica
from quire.cluster.replica_hub import ReplicaHub
from quire.types import messages
from quire.types.cache_control import CacheOrder, CacheReport
from quire.types.errors import EngineDeadError, QuireError, from_wire
from quire.types.events import EngineStats
from quire.types.timeline import Timeline
from quire.types.view import EngineView

Kind = TypeVar("Kind", bound=messages.Answer)

MAX_PARTED = 64  # processes whose counters are known apart, in case they can be reached again
MAX_RESUMED = 4096  # requests whose further ids are remembered


class ReplicaQueries:
    """The part of an engine client that asks."""

    _replicas: list[Replica]

    def __init__(self, hub: ReplicaHub) -> None:
        self.loop = asyncio.get_running_loop()
        self.hub = hub
        self.adapters: list[messages.AdapterInfo] = []
        self._by_identity: dict[str, Replica] = {}
        self._resumed: dict[str, list[str]] = {}  # ids that requests went on under, the latest last
        self._latest: dict[str, EngineStats] = {}  # what each process said of itself, the latest
        self._parted: dict[str, EngineStats] = {}  # ... and of those that were lost, which may come back
        self._ended = EngineStats()  # what processes counted that have ended: sums do not fall

    @property
    @abstractmethod
    def _starts_from_zero(self) -> bool:
        """Whether a request that finds no replica starts one."""

    async def stats(self) -> EngineStats:
        """Of all replicas, and of those that have ended; where there may be none, of these alone."""
        asked = list(self._by_identity.values())
        answers = await asyncio.gather(*map(self.stats_of, asked), return_exceptions=True)
        refused = [one for one in answers if isinstance(one, Exception) and not isinstance(one, EngineDeadError)]
        found = [self._latest[one.process] for one in self._by_identity.values() if one.process in self._latest]
        if refused:
            raise refused[0]
        if not found and not self._starts_from_zero:
            raise EngineDeadError(NO_REPLICA)
        return self._since_start(sum_stats(found or [EngineStats()]))

    async def stats_of(self, replica: Replica) -> EngineStats:
        identity = replica.identity
        stats = (await self._ask(replica, messages.GetStats(), messages.Stats)).stats
        if identity in self._by_identity:
            self._latest[replica.process] = stats
            self._parted.pop(replica.process, None)
        return stats

    def _since_start(self, stats: EngineStats) -> EngineStats:
        """With what replicas counted that have ended."""
        return replace(sum_stats([stats, *self._parted.values(), self._ended]), sleep_level=stats.sleep_level)

    def _on_process_ended(self, process: str) -> None:
        """A process has ended, or cannot be reached."""
        if (stats := self._latest.pop(process, None)) is not None:
            self._parted[process] = stats.counted()
            if len(self._parted) > MAX_PARTED:
                self._ended = sum_stats([self._parted.pop(next(iter(self._parted))), self._ended])

    async def view(self) -> EngineView:
        answers = await self._ask_all(messages.GetView(), messages.View)
        view = merge_views([answer.view for _, answer in answers], [replica.id for replica, _ in answers])
        return replace(view, stats=self._since_start(view.stats))

    async def timelines(self, request_id: str) -> list[Timeline]:
        """Of all parts that replicas remember, where a request went on on others."""
        found: list[Timeline] = []
        for part in (request_id, *self._resumed.get(request_id, ())):
            for _, answer in await self._ask_all(messages.GetTimelines(part), messages.Timelines):
                found += [replace(timeline, request=request_id) for timeline in answer.timelines]
        return found

    def _remember(self, request_id: str, part: str) -> None:
        """A request goes on under another id."""
        self._resumed.setdefault(request_id, []).append(part)
        if len(self._resumed) > MAX_RESUMED:
            del self._resumed[next(iter(self._resumed))]

    async def power(self, *, asleep: bool, level: int = 1) -> None:
        if self._starts_from_zero and not self._by_identity:
            return  # there is no memory to free, or to take before a request comes
        await self._ask_all(messages.Power(asleep, level), messages.Powered)

    async def cache(self, order: CacheOrder) -> tuple[CacheReport, bytes]:
        """Of an export, the bundle of the replica that holds most of the prompt."""
        export = order.action == "export"
        if order.action == "drop":
            self._note_order()
        answers = [answer for _, answer in await self._ask_all(messages.Cache(order), messages.Cached, one=export)]
        if export:
            best = max(answers, key=lambda answer: answer.report.pages)
            return best.report, best.data
        return merge_reports([answer.report for answer in answers]), b""

    async def load_adapter(self, name: str, path: str) -> None:
        """On all replicas, or on none."""
        self._note_order()
        try:
            answers = await self._ask_all(messages.LoadAdapter(name, path), messages.Adapted)
        except QuireError:
            if all(one.name != name for one in self.adapters):
                with suppress(QuireError):
                    await self._ask_all(messages.UnloadAdapter(name), messages.Adapted, one=True)
            raise
        self.adapters = answers[0][1].adapters

    async def unload_adapter(self, name: str) -> None:
        self._note_order()
        answers = await self._ask_all(messages.UnloadAdapter(name), messages.Adapted, one=True)
        self.adapters = answers[0][1].adapters

    def reset(self) -> None:
        self._note_order()
        for replica in self._by_identity.values():
            self._send_reset(replica)

    def _send_reset(self, replica: Replica) -> None:
        self.hub.send(replica.identity, messages.Reset())
        self.hub.send(replica.identity, messages.Query(messages.GetStats()))  # whose answer says that it was done

    def _note_order(self) -> None:
        """All replicas are told to drop or to load something; who cannot be reached is told when it joins again."""
        order = messages.Query(messages.GetStats()).id  # answers to later queries say that it was heard
        for replica in self._replicas:
            replica.last_order = order

    def _bring_up_to_date(self, replica: Replica, there: list[messages.AdapterInfo]) -> None:
        """A new process has the adapters named at start, one that was cut off may have missed what all were told: bring
        it to what the others have, before any request."""
        missed = replica.missed_orders
        if missed:
            self._send_reset(replica)
        for one in (one for one in there if missed or one not in self.adapters):
            self.hub.send(replica.identity, messages.Query(messages.UnloadAdapter(one.name)))
        for one in (one for one in self.adapters if missed or one not in there):
            self.hub.send(replica.identity, messages.Query(messages.LoadAdapter(one.name, one.path)))

    async def _ask_all(
        self, question: messages.Question, kind: type[Kind], *, one: bool = False
    ) -> list[tuple[Replica, Kind]]:
        """What all replicas that are there answer; those that are lost meanwhile are left out. A refusal is raised,
        with `one` only if all refuse."""
        asked = list(self._by_identity.values())
        answers = await asyncio.gather(*(self._ask(each, question, kind) for each in asked), return_exceptions=True)
        found: list[tuple[Replica, Kind]] = []
        refused: BaseException | None = None
        for replica, answer in zip(asked, answers, strict=True):
            if isinstance(answer, kind):
                found.append((replica, answer))
            elif isinstance(answer, BaseException) and not isinstance(answer, EngineDeadError):
                refused = refused or answer
        if refused is not None and not (one and found):
            raise refused
        if not found:
            raise EngineDeadError(NO_REPLICA)
        return found

    async def _ask(self, replica: Replica, question: messages.Question, kind: type[Kind]) -> Kind:
        query = messages.Query(question)
        future = replica.pending_queries[query.id] = self.loop.create_future()
        self.hub.send(replica.identity, query)
        try:
            answer = await future
        finally:
            replica.pending_queries.pop(query.id, None)
        if isinstance(answer, messages.Refused):
            raise from_wire(answer.error, answer.message)
        assert isinstance(answer, kind)
        return answer
