"""The small interfaces behind which things are exchanged. Torch-typed seams live in `kernels` and `model`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from quire.types.autoscaling import AutoscalingView
from quire.types.cache_control import CacheOrder, CacheReport
from quire.types.errors import QuireError
from quire.types.events import EngineStats, TokenEvent
from quire.types.grammar import GrammarSpec, TokenMasks, Vocabulary
from quire.types.kv import KVLayout
from quire.types.membership import PeerLink, ReplicaView
from quire.types.messages import AdapterInfo, EngineInfo
from quire.types.plan import Admit, Capacity, StepPlan, StepResult
from quire.types.request import Request
from quire.types.timeline import Timeline
from quire.types.transfer import KVConnector
from quire.types.view import EngineView


class Closable(Protocol):
    def close(self) -> None: ...


class Ticket(Protocol):
    """A step under way. `result` waits for it; tickets end in the order they were submitted."""

    def result(self) -> StepResult: ...


class ExecutorInfo(msgspec.Struct, frozen=True):
    """What an executor runs on, for people to read."""

    device: str
    dtype: str
    vocab_size: int
    reasons: list[str]  # of its decisions, a line each
    startup_s: dict[str, float]  # seconds by stage of the start
    labels: int = 0  # classes that the model scores
    token_types: int = 0  # segments that it tells apart
    sparse: bool = False  # whether requests may have `sparse_pages`


class Executor(Protocol):
    """Runs plans on a device (or on several, or on none: the simulator)."""

    layout: KVLayout

    def start(self) -> Capacity: ...

    def describe(self) -> ExecutorInfo: ...

    def prepare(self, grammar: GrammarSpec) -> Future[Any]:
        """Make ready what requests with this grammar will need, beside the steps; a bad one ends in InputError."""
        ...

    def submit(self, plan: StepPlan) -> Ticket: ...

    def check(self) -> None:
        """EngineDeadError, if something that it needs has ended; called while there is nothing to do."""
        ...

    def idle(self, *, quiet: bool) -> bool:
        """Nobody asks for anything: a little of what the start left for later is done; whether there is more to do now.
        `quiet`: nobody has for a while."""
        ...

    def load_adapter(self, slot: int, path: str) -> str:
        """Fill a slot with the LoRA adapter there; steps submitted from now on may use it. Its digest: equal where it
        computes the same."""
        ...

    def unload_adapter(self, slot: int) -> None:
        """No request has this slot's adapter any more."""
        ...

    def room_asleep(self) -> int:
        """How many cached pages host memory has room for while the device sleeps at level 1; 0 where it is the same
        memory."""
        ...

    def sleep(self, pages: list[int], level: int) -> None:
        """Free the device's memory; the content of these pages is wanted again. Nothing is in flight. Weights wait in
        host memory (level 1), or are given up (2) and loaded again."""
        ...

    def wake(self, on_progress: Callable[[], object]) -> None:
        """`on_progress` is called again and again while weights are loaded, in the caller's thread."""
        ...

    def rank_memory(self) -> tuple[int, int]:
        """Of its processes beside this one: bytes of their KV pages, and bytes resident."""
        ...

    @property
    def kind(self) -> str:
        """Equal where the contents of pages are interchangeable."""
        ...

    def read_pages(self, pages: list[int]) -> list[bytes]:
        """What device pages hold after the steps submitted so far."""
        ...

    def write_pages(self, pages: list[int], content: list[bytes]) -> None:
        """Fill device pages that no step uses."""
        ...

    def connect(self, peers: PeerLink) -> KVConnector | None:
        """Let plans have transfers from and to peers; None where that cannot be."""
        ...

    def close(self) -> None: ...


class Grammar(Protocol):
    """The state of constrained decoding in one answer. An error is final: `fill` then allows nothing to rely on."""

    @property
    def error(self) -> str:
        """Why it cannot go on; '' while it can."""
        ...

    @property
    def done(self) -> bool:
        """Nothing may follow."""
        ...

    def fill(self, row: npt.NDArray[np.uint8]) -> None:
        """Set the bits (lowest first) of the tokens that may come next; ends count once the answer is complete."""
        ...

    def accept(self, tokens: Sequence[int]) -> None: ...

    def forced(self) -> list[int]:
        """Tokens that must come next, whatever is sampled (jump-ahead); not yet accepted."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        ...

    def fork(self) -> Grammar: ...


class GrammarBackend(Protocol):
    threads: int  # that move several grammars at once; forks of one wait for each other

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> Grammar:
        """The grammar before any token; InputError with the reason if it makes no sense or is too large."""
        ...

    def accept_each(self, grammars: Sequence[Grammar], tokens: Sequence[int]) -> None:
        """Each accepts a token of its own."""
        ...

    def fill_each(self, grammars: Sequence[Grammar], size: int) -> TokenMasks:
        """Each fills a row of its own, of so many bytes."""
        ...


class DraftContext:
    """A sequence as a proposer sees it. It lives as long as its slot is filled; a proposer may keep what it likes in
    `state`. For those that read hidden states, `hidden` holds, during `observe`, those that tokens were sampled
    from: one each, but none for tokens that a grammar forced."""

    __slots__ = ("admit", "hidden", "slot", "state", "tokens")

    def __init__(self, admit: Admit):
        self.admit = admit
        self.slot = admit.slot
        self.tokens = list(admit.tokens)  # all that are known
        self.state: Any = None
        self.hidden: Any = None


class DraftTree(NamedTuple):
    """A draft whose tokens branch: each follows another, or the last known token."""

    tokens: list[int]
    parents: list[int]  # index of the token each follows, always one before it; -1: the last known token

    def first_branch(self) -> list[int]:
        """The chain of every first child."""
        found, node = [], -1
        while node in self.parents:
            node = self.parents.index(node)
            found.append(self.tokens[node])
        return found


class Proposer(Protocol):
    """Drafts tokens that may come next. A rejected draft costs time, never correctness."""

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> Sequence[list[int] | DraftTree]:
        """For each context up to so many tokens that may follow; none is fine."""
        ...

    def observe(self, context: DraftContext, tokens: Sequence[int]) -> None:
        """These tokens were added to the context (accepted draft tokens among them)."""
        ...

    def forget(self, context: DraftContext) -> None:
        """The sequence has left its slot."""
        ...


class EventStream(Protocol):
    """Events of one request, as many at a time as have come. `sink`, if set, is offered each event first while the
    reader waits, and says whether it took it; a client may ignore it."""

    sink: Callable[[TokenEvent], bool] | None

    def __aiter__(self) -> EventStream: ...

    async def __anext__(self) -> list[TokenEvent]: ...

    async def aclose(self) -> None: ...


class EngineClient(Protocol):
    """One engine or a thousand: what the servers and the language see."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: Request) -> EventStream:
        """Events of the request until every branch finished; closing it before aborts the request."""
        ...

    def abort(self, request_id: str) -> None: ...

    def finish_at(self, request_id: str, branch: int, tokens: int) -> None: ...

    async def stats(self) -> EngineStats: ...

    async def replicas(self) -> list[ReplicaView]: ...

    async def power(self, *, asleep: bool, level: int = 1) -> None: ...

    async def cache(self, order: CacheOrder) -> tuple[CacheReport, bytes]:
        """Look at the KV cache, or change it; of an export, the bundle too."""
        ...

    @property
    def adapters(self) -> list[AdapterInfo]:
        """LoRA adapters that requests may name."""
        ...

    async def load_adapter(self, name: str, path: str) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def view(self) -> EngineView: ...

    async def timelines(self, request_id: str) -> list[Timeline]:
        """What happened to the branches of a request, running or lately ended."""
        ...

    def trouble(self) -> str | None:
        """Why no request could be served now; None if one could. Cheap: it looks, it does not ask."""
        ...

    async def lost(self) -> QuireError:
        """Wait until the engine is gone for good; returns why."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class ReplicaOperator(Protocol):
    """A client whose engines can be replaced one by one. `timeout`: seconds that an engine's requests have to finish
    before they go on elsewhere."""

    async def drain(self, id: str, timeout: float) -> ReplicaView:
        """Send it nothing new; returns when it has nothing to do."""
        ...

    def activate(self, id: str) -> ReplicaView: ...

    async def set_role(self, id: str, role: str) -> ReplicaView:
        """Give an engine the role of computing prompts (prefill), answering (decode), or both; it keeps it."""
        ...

    @property
    def migrations(self) -> int:
        """Requests that went on on another engine from their KV pages."""
        ...

    @property
    def role_switches(self) -> int:
        """Times that an engine changed its role because the load's shape did."""
        ...

    async def restart(self, id: str, timeout: float) -> ReplicaView: ...

    async def rolling_restart(self, timeout: float) -> list[ReplicaView]: ...

    def autoscaling(self) -> AutoscalingView | None:
        """None: the number of engines is fixed."""
        ...

    @property
    def pending(self) -> int:
        """Requests that wait for an engine while there is none."""
        ...


class TensorInfo(msgspec.Struct, frozen=True):
    """One stored tensor: shape outermost dimension first, kind as the file names it (F32, BF16, Q4_1, ...)."""

    name: str
    shape: tuple[int, ...]
    kind: str
    nbytes: int


class WeightSource(Protocol):
    """A model's weight files behind one interface. Bytes are raw and mapped, not copied; blocks stay quantised."""

    def metadata(self) -> dict[str, Any]:
        """The model's own description: config.json of a safetensors directory, the key-values of a GGUF."""
        ...

    def tensors(self) -> dict[str, TensorInfo]: ...

    def read(self, name: str) -> np.ndarray:
        """Raw bytes of one tensor as a read-only uint8 array."""
        ...
