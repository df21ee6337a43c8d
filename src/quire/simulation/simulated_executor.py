"""An executor without a device: a step takes as long as the cost model says, on a virtual clock, and draws what the
trace says.

Token values stand for content: in a prompt the id of its block, in an answer the number of its request; a page is
named by its place and its last token, because equal blocks of a trace have equal histories. Refuses to know: arrivals,
figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from quire.types.clock import Clock
from quire.types.cost_model import CostModel, work_of
from quire.types.errors import ConfigError
from quire.types.grammar import GrammarSpec
from quire.types.hashing import PageHasher
from quire.types.kv import KVGroup, KVLayout
from quire.types.membership import PeerLink
from quire.types.plan import Capacity, StepPlan, StepResult
from quire.types.seams import ExecutorInfo

STOP_TOKEN = 0
STOP = [STOP_TOKEN]
PLACE_BITS = 32  # of a page's name
FIRST_OUTPUT = 1 << 60  # drawn tokens are this and the number of their request: no block of a trace is called so


class SimulatedTicket:
    __slots__ = ("_clock", "_end", "_result")

    def __init__(self, clock: Clock, end: float, result: StepResult):
        self._clock = clock
        self._end = end
        self._result = result

    def result(self) -> StepResult:
        self._clock.now = max(self._clock.now, self._end)
        return self._result


class SimulatedExecutor:
    kind = "simulated"

    def __init__(self, model: CostModel, clock: Clock, lengths: Mapping[str, int]):
        """`lengths`: output tokens by request."""
        machine = model.machine
        self.layout = KVLayout((KVGroup((0,), machine.page_size, 1, 1),), "float16")
        self._capacity = Capacity(
            pages=machine.pages + 1,
            slots=machine.slots,
            max_model_len=machine.max_model_len,
            max_batch_tokens=machine.max_batch_tokens,
            depth=machine.depth,
            step_target=machine.step_target,
            captured=tuple(machine.captured),
        )
        self._model = model
        self._launches = machine.launch > 0  # whether they take time
        self._clock = clock
        self._lengths = lengths
        self._last = [0] * machine.slots  # by slot: where the last token of its answer stands
        self._drawn: list[list[int]] = [[]] * machine.slots  # ... and what is drawn before it
        self._free = 0.0  # when the device has done all that was submitted
        self.busy = 0.0  # seconds of work so far

    def start(self) -> Capacity:
        return self._capacity

    def submit(self, plan: StepPlan) -> SimulatedTicket:
        for admit in plan.admits:
            request = admit.key.rpartition("/")[0]
            self._last[admit.slot] = admit.prompt_len + self._lengths[request] - 1
            self._drawn[admit.slot] = [FIRST_OUTPUT + int(request)]
        work = work_of(plan.rows)
        seconds = self._model.seconds(work)
        self._free = max(self._free, self._clock.now) + seconds
        if self._launches:
            self._clock.now += self._model.launch_seconds(work)
            self._free = max(self._free, self._clock.now)
        self.busy += seconds
        last, drawn = self._last, self._drawn
        tokens = [drawn[s.slot] if s.position < last[s.slot] else STOP for s in plan.samples]
        return SimulatedTicket(self._clock, self._free, StepResult(plan.step, tokens, seconds=seconds))

    def describe(self) -> ExecutorInfo:
        return ExecutorInfo(self._model.device, "simulated", 0, [f"cost model: {self._model.source}"], {})

    def prepare(self, grammar: GrammarSpec) -> Future[Any]:
        raise ConfigError("the simulator has no grammars")

    def check(self) -> None:
        pass

    def idle(self, *, quiet: bool) -> bool:
        return False

    def load_adapter(self, slot: int, path: str) -> str:
        return path

    def unload_adapter(self, slot: int) -> None:
        pass

    def room_asleep(self) -> int:
        return 0

    def sleep(self, pages: list[int], level: int) -> None:
        raise ConfigError("a simulated device does not sleep")

    def wake(self, on_progress: Callable[[], object]) -> None:
        raise ConfigError("a simulated device does not sleep")

    def rank_memory(self) -> tuple[int, int]:
        return 0, 0

    def read_pages(self, pages: list[int]) -> list[bytes]:
        raise ConfigError("pages of a simulated device hold nothing")

    def write_pages(self, pages: list[int], content: list[bytes]) -> None:
        raise ConfigError("pages of a simulated device hold nothing")

    def connect(self, peers: PeerLink) -> None:
        """Pages are not handed over."""

    def close(self) -> None:
        """There is nothing to give back."""


class ContentNames(PageHasher):
    """Names of pages by their place and last token: no hashing, because token values tell whole histories apart."""

    def __init__(self, tokens_per_page: int):
        super().__init__(b"simulated", tokens_per_page)

    def chain(self, parent: bytes, tokens: Sequence[int], first: int = 0) -> list[Any]:
        last = tokens[(first + 1) * self._size - 1 :: self._size]
        return [token << PLACE_BITS | place for place, token in enumerate(last, first)]
