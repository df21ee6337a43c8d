"""KV hand-over: pages that peers want are sent as soon as they are computed here.

    a peer wants pages ──► those in the prefix cache go with the next plan, others with the step that fills them
                       └─► what will not be computed (its request is over, or was never to come) the peer is told

A page goes while the rest of its prompt is still computed: layer by layer as the step that fills it writes them, where
the executor can, else when that step has landed. Refuses to know: who decides that pages are handed over, how bytes
move.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from quire.memory.manager import KVManager
from quire.memory.tiers import Directory
from quire.scheduling.feature import SchedulingFeature
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.sequence import Sequence
from quire.types.clock import Clock
from quire.types.handover import Handover
from quire.types.plan import StepResult
from quire.types.request import FinishReason, Request
from quire.types.transfer import Key, Wanted

MAX_REMEMBERED = 4096  # hand-overs that were asked for, and those whose request is over
MAX_HOLD_S = 0.05  # that a prompt waits for the peer to ask for its pages


class PendingTransfer:
    """What a peer still waits for."""

    def __init__(self, wanted: Wanted, now: float):
        self.handover = Handover(wanted.handover)
        self.keys = dict.fromkeys(wanted.keys)
        self.waits = wanted.waits
        self.timeout = wanted.timeout
        self.until = now + wanted.timeout


class KVHandover(SchedulingFeature):
    def __init__(
        self,
        memory: KVManager,
        directory: Directory,
        clock: Clock,
        in_flight: Iterable[PlanBuilder],
        *,
        layerwise: bool = False,
    ):
        """`in_flight`: steps that have not landed; `layerwise`: the executor sends pages as layers are written."""
        self._layerwise = layerwise
        self._memory = memory
        self._directory = directory
        self._clock = clock
        self._in_flight = in_flight
        self._sizes = [group.tokens_per_page for group in memory.layout.groups]
        self._pending: dict[str, PendingTransfer] = {}  # by hand-over
        self._asked: OrderedDict[str, None] = OrderedDict()  # hand-overs that peers have asked for pages of
        self._held_since: dict[str, float] = {}  # hand-overs whose prompts wait for that
        self._finished_handovers: OrderedDict[str, None] = OrderedDict()  # whose request has computed all it will
        self._in_flight_sends: list[tuple[int, Handover, list[Key]]] = []  # by the step that they go with
        self._dirty = False  # whether something may have become possible to send, or impossible

    @property
    def busy(self) -> bool:
        """Whether a plan is needed even if no request is there."""
        return self._dirty and bool(self._pending)

    def on_page_request(self, wanted: Wanted) -> None:
        """A peer asks for pages."""
        self._pending[wanted.handover] = PendingTransfer(wanted, self._clock.now)
        self._asked[wanted.handover] = None
        if len(self._asked) > MAX_REMEMBERED:
            self._asked.popitem(last=False)
        self._dirty = True

    def step_landed(self, step: PlanBuilder, result: StepResult) -> None:
        if self._in_flight_sends:
            self._in_flight_sends = [one for one in self._in_flight_sends if one[0] > step.plan.step]
        self._dirty = True

    def finished(self, seq: Sequence, reason: FinishReason | None) -> None:
        self.on_request_over(seq.request)

    def on_request_over(self, request: Request) -> None:
        """Nothing more is computed for it, or it was refused."""
        if (handover := request.handover) is not None and not handover.source:
            self._held_since.pop(handover.id, None)
            self._finished_handovers[handover.id] = None
            self._dirty = True
            if len(self._finished_handovers) > MAX_REMEMBERED:
                self._finished_handovers.popitem(last=False)

    def holds(self, seq: Sequence, builder: PlanBuilder) -> bool:
        """A prompt that is computed for a peer waits until that asks for its pages, which a step must know to send them
        as it writes them: the peer hears of the request at the same time."""
        handover = seq.request.handover
        if not self._layerwise or handover is None or handover.source or handover.id in self._asked:
            return False
        return self._clock.now - self._held_since.setdefault(handover.id, self._clock.now) < MAX_HOLD_S

    def contribute(self, builder: PlanBuilder) -> None:
        if not self.busy:
            return
        self._dirty, now = False, self._clock.now
        writing = {page for step in (*self._in_flight, builder) for page in self._written_by(step)}
        for name, one in list(self._pending.items()):
            found = {key: page for key, page in self._held(one) if page not in writing}
            self._give(builder, one, found)
            if one.keys and (not one.waits or name in self._finished_handovers or now > one.until):
                self._directory.mark_unavailable(one.handover, list(one.keys))
                one.keys.clear()
            if not one.keys:
                del self._pending[name]

    def send_layerwise(self, builder: PlanBuilder) -> None:
        """All rows of a plan are known: what they fill goes while they are computed."""
        if not (self._layerwise and self._pending and builder.plan.rows):
            return
        filling = self._written_by(builder)
        for name, one in list(self._pending.items()):
            found = {key: page for key, page in self._held(one) if page in filling}
            self._give(builder, one, found, layerwise=True)
            if not one.keys:
                del self._pending[name]

    def _held(self, one: PendingTransfer) -> list[tuple[Key, int]]:
        return [(key, page) for key in one.keys for page in self._memory.index.run(key[0], [key[1]])]

    def _give(
        self, builder: PlanBuilder, one: PendingTransfer, found: dict[Key, int], *, layerwise: bool = False
    ) -> None:
        if found:
            self._directory.give(one.handover, found, layerwise=layerwise)
            self._in_flight_sends.append((builder.plan.step, one.handover, list(found)))
            one.until = self._clock.now + one.timeout
        for key in found:
            del one.keys[key]

    def _written_by(self, step: PlanBuilder) -> set[int]:
        """Full pages of prompts are in the prefix cache from when their step is planned; until it lands, nobody else
        may read them."""
        return {
            page
            for row, (seq, _) in zip(step.plan.rows, step.rows, strict=True)
            for size, pages in zip(self._sizes, seq.table.pages, strict=True)
            for page in pages[row.start // size : -(-(row.start + row.count + row.drafts) // size)]
        }

    def step_failed(self) -> None:
        """Nothing is cached any more, and what went with the step may not have gone."""
        for _, handover, keys in self._in_flight_sends:
            self._directory.mark_unavailable(handover, keys)
        self._in_flight_sends, self._dirty = [], True
