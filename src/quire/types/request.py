"""A request as it travels, and the states a sequence of it may be in.

One request has `params.n` branches; each branch is one sequence with its own tokens, pages and slot.
"""

from __future__ import annotations

import enum
import math

import msgspec
from msgspec.structs import replace

from quire.types.beam import BeamParams
from quire.types.blend import Blend
from quire.types.handover import Handover
from quire.types.sampling_params import SamplingParams

HOLD = 300.0  # seconds that a session's pages are kept where the caller does not say
MAX_HOLD = 86_400.0


class Request(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the engine needs to know of one request; token ids only, text stays with the client.

    `arrival` and `deadline` are wall-clock seconds since the epoch on the wire; an engine converts them to its own
    monotonic clock on receipt (types.messages.received)."""

    id: str
    prompt: list[int]
    params: SamplingParams
    arrival: float = 0.0  # 0: when the engine receives it
    priority: int = 0
    tenant: str = ""  # who is served: the name of the API key; what policies are fair between
    weight: float = 1.0  # of the tenant: what share it gets beside others
    slo_ttft: float = 0.0  # target for the time to first token, in seconds; 0: the server's, if that has one
    slo_tpot: float = 0.0  # target for the time per output token
    background: bool = False  # nobody waits for it (a batch): it runs below all that is interactive
    salt: str = ""  # requests with different salts never share pages
    eos_token_ids: list[int] = []
    keep: int = 0  # of its branches, the caller wants only the likeliest so many; 0: all
    outputs: list[int] = []  # tokens that another engine has drawn already: this one goes on behind them
    branch: int = 0  # number of its first branch: noise depends on it, wherever that branch goes on
    longest_wait: float = 0.0  # refuse it if its first token is predicted to take longer, in seconds; 0: any time
    deadline: float = 0.0  # on the clock of `arrival`: work not done by then is cancelled; 0: no deadline
    beam: BeamParams | None = None  # answers are found by beam search; `params` only says how many
    session: str = ""  # whose pages stay for a while after its end
    hold: float = 0.0  # ... so many seconds
    blend: Blend | None = None  # chunks of the prompt whose KV may come from other places
    prediction: list[int] = []  # what the caller thinks the answer will be: drafts are taken from it
    handover: Handover | None = None  # its KV pages come from another engine, or go to one
    lora: str = ""  # name of the adapter it runs with; empty: the base model
    lora_slot: int = 0  # ... where the engine keeps that; set by the engine
    pooling: str = ""  # mean, cls, last or classify: no tokens are drawn, the answer is the pooled hidden state

    @property
    def branches(self) -> range:
        """Numbers of its answers."""
        return range(self.branch, self.branch + self.params.n)


def longest_first(requests: list[Request]) -> list[Request]:
    """A batch that counts as done when its last answer is, in the order to begin it, as of one moment: whoever may draw
    most tokens would else be drawing them alone at the end."""
    moment = min((request.arrival for request in requests), default=0.0)

    def most(request: Request) -> float:
        limit = request.params.max_tokens
        return math.inf if limit is None else limit

    return [replace(one, arrival=moment, background=True) for one in sorted(requests, key=most, reverse=True)]


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


ENDED_WELL = (FinishReason.STOP, FinishReason.LENGTH)


class Status(enum.StrEnum):
    """The life of one sequence.

        WAITING ──► RUNNING ──► FINISHED
           │  ▲        │  ▲         ▲
           ▼  │        ▼  │         │
        PENDING     PREEMPTED ──────┘   (any state may finish: abort, stop)

    PENDING: pages it will share are still being produced (another row computes them, or a tier or a peer
    delivers them); it holds no pages of its own. PREEMPTED: lost its pages, kept its tokens.
    """

    WAITING = "waiting"
    PENDING = "pending"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.PENDING, Status.RUNNING, Status.FINISHED}),
    Status.PENDING: frozenset({Status.WAITING, Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.PREEMPTED, Status.FINISHED}),
    Status.PREEMPTED: frozenset({Status.PENDING, Status.RUNNING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}
