"""One simulated replica: an engine core that steps on a virtual clock as an engine process does in real time.

    arrivals due ──► submit ──► step (plan, submit, land) ──► the clock is where the oldest step ended

Refuses to know: other replicas, where arrivals come from.
"""

from __future__ import annotations

import enum
from bisect import insort
from collections import deque
from collections.abc import Iterator
from math import inf

from quire.engine.core import EngineCore
from quire.memory.manager import PageTable
from quire.scheduling import OraclePredictor
from quire.simulation.records import Recorder, Result
from quire.simulation.simulated_executor import STOP_TOKEN, ContentNames, SimulatedExecutor
from quire.simulation.traces import Arrival, prompt_tokens
from quire.types.clock import Clock
from quire.types.config import EngineOptions
from quire.types.cost_model import CostModel
from quire.types.errors import ConfigError, EngineDeadError, QuireError
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

START = 1.0  # of the virtual clock: in timelines 0 means never
MAX_STILL = 1000  # steps that may pass while the clock stands still
OUTPUT_CAP = 4096  # tokens that a request asks for at most: how long its answer becomes is not known before


class Kind(enum.IntEnum):
    """What a replica is to do for a request."""

    PLAIN = 0
    PREFILL_ONLY = 1  # compute its prompt, for another replica
    HANDED_OVER = 2  # answer it: its prompt was computed by another


class Replica:
    def __init__(self, options: EngineOptions, model: CostModel, *, oracle: bool = False, observes: bool = False):
        """`oracle`: how long answers become is known in advance, to policies that ask; `observes`: the router is told
        of first tokens and ends."""
        self._clock = Clock(START)
        self._lengths: dict[str, int] = {}
        self.executor = SimulatedExecutor(model, self._clock, self._lengths)
        self.recorder = Recorder(self._clock, self._lengths, observes=observes)
        self.core = EngineCore(
            options,
            self.executor,
            clock=lambda: self._clock.now,
            listeners=[self.recorder],
            predictor=OraclePredictor(self._lengths) if oracle else None,
            streams=False,  # the recorder hears of what matters
        )
        self.core.scheduler.memory.name_pages_by(ContentNames)
        self._due: deque[tuple[Arrival, int]] = deque()
        self._needs: dict[int, int] = {}  # tokens to compute, of requests that are due
        self._kinds: dict[int, Kind] = {}  # of requests that are due and not plain
        self._longest = min(model.machine.max_model_len, model.machine.pages * model.machine.page_size)
        self._params: dict[int, SamplingParams] = {}  # by most tokens: requests share them

    def arrives(
        self, one: Arrival, number: int, need: int | None = None, since: float = 0.0, kind: Kind = Kind.PLAIN
    ) -> None:
        """In the order of arrival; `number` is the request's own; `need`: tokens of its prompt that are expected to be
        computed, all unless said. It is not worked on before `since`."""
        if need is not None:
            self._needs[number] = need
        self._due.append((one, number))
        if kind is not Kind.PLAIN:
            self._kinds[number] = kind
        if one.at < since:
            self._clock.now = max(self._clock.now, since + START)

    def close_loop(self, work: Iterator[tuple[Arrival, int]], clients: int, think: float) -> None:
        """So many clients ask one after the other, each again when it has its answer and has thought about it."""

        def next_call(at: float) -> None:
            if (call := next(work, None)) is not None:
                insort(self._due, (call[0]._replace(at=at), call[1]), key=lambda one: one[0].at)

        self.recorder.ended = lambda: next_call(self._clock.now - START + think)
        for _ in range(clients):
            next_call(0.0)

    def run(self, until: float = inf) -> None:
        """Up to a moment of the trace's time; a step that is under way then ends first."""
        clock, core, due, until = self._clock, self.core, self._due, until + START
        still = 0  # steps in a row that took no time
        while clock.now < until:
            while due and due[0][0].at + START <= clock.now:
                self._submit(*due.popleft())
            if core.busy:
                before = clock.now
                core.step()
                still = still + 1 if clock.now == before else 0
                if still > MAX_STILL:
                    raise EngineDeadError("the simulated engine does not get on: nothing that waits can be planned")
            elif due:
                clock.now = min(until, due[0][0].at + START)
            else:
                break
        core.settle()

    def _import(self, tokens: list[int]) -> None:
        """Pages of a prompt that another replica computed, as far as there is room for those that are not here."""
        memory = self.core.scheduler.memory
        table = PageTable(1)
        memory.hash_pages(table, tokens, "")
        size, names = memory.layout.groups[0].tokens_per_page, table.hashes[0]
        here = memory.lookup(table, len(tokens) + 1).tokens // size
        places = range(here, len(names))
        contents = [((0, names[i]), table.name_before(0, i), tokens[i * size : (i + 1) * size]) for i in places]
        memory.import_pages(contents, lambda pages: None)

    def _submit(self, one: Arrival, number: int) -> None:
        kind, need = self._kinds.pop(number, Kind.PLAIN), self._needs.pop(number, one.prompt)
        if kind is Kind.PREFILL_ONLY:
            one = one._replace(outputs=1)
        most = min(max(OUTPUT_CAP, one.outputs), self._longest - one.prompt)
        if most < one.outputs:
            self._refuse(number, kind, "too long")
            return
        if (params := self._params.get(most)) is None:
            params = self._params[most] = SamplingParams(
                temperature=0.0, seed=0, max_tokens=most, stop_token_ids=[STOP_TOKEN]
            )
        name = str(number)
        self._lengths[name] = one.outputs
        tokens = prompt_tokens(one, number)
        if kind is Kind.HANDED_OVER:
            self._import(tokens)
        request = Request(
            id=name,
            prompt=tokens,
            params=params,
            arrival=one.at + START,
            tenant=one.tenant,
            slo_ttft=one.ttft,
            slo_tpot=one.tpot,
            background=one.background,
        )
        prefill_only, handed_over = kind is Kind.PREFILL_ONLY, kind is Kind.HANDED_OVER
        self.recorder.expect(name, one, need, prefill_only=prefill_only, handed_over=handed_over)
        try:
            self.core.submit(request)
        except QuireError as error:
            self._refuse(number, kind, type(error).__name__)
            self._lengths.pop(name, None)

    def _refuse(self, number: int, kind: Kind, why: str) -> None:
        if kind is Kind.PREFILL_ONLY:
            self.recorder.prefill_refused(number)
        else:
            self.recorder.refused(number, why)

    @property
    def load(self) -> tuple[int, int]:
        """Requests under way or due, and tokens to be computed of those without a first token: what a cluster's router
        knows of a replica."""
        tokens = self.recorder.tokens + sum(self._needs.get(number, one.prompt) for one, number in self._due)
        return len(self.core.scheduler.sequences.requests) + len(self._due), tokens

    def result(self) -> Result:
        if self.core.busy:
            raise ConfigError("the simulation is not over")
        return self.recorder.result(self.core.stats(), self.executor.busy)
