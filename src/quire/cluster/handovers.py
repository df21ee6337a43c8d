"""Prefill-decode disaggregation: which prompts another replica computes, and what is arranged for their pages.

    request ──► the router's replica (decode) ──── waits for pages, or computes what does not come
         └────► a prefill replica: computes the prompt, hands each page over as it is done, says nothing

A prompt is computed elsewhere where that is predicted to cost less: in tokens to be computed one after the other, by
whom it delays. Replicas of the prefill role take no requests while any other is ready; when none is, they do. Refuses
to know: Ray, how pages travel.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from quire.cluster.replica_handle import InternalRequest, Replica, ReplicaState
from quire.cluster.replica_hub import ReplicaHub
from quire.cluster.request_router import RequestRouter
from quire.types.errors import InputError
from quire.types.events import TokenEvent
from quire.types.handover import Handover
from quire.types.messages import Abort, Submit
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

PREFILL, DECODE, BOTH = "prefill", "decode", "both"
ROLES = (PREFILL, DECODE, BOTH)
FIXED_TOKENS = 128  # what a hand-over costs, in tokens computed meanwhile, until it was measured
# Prompts of which no more is to be computed stay: they delay a step by little, and hits are known by blocks only.
MAX_LOCAL_PREFILL_TOKENS = 128
SMOOTHING = 0.2  # share of the latest measurement in an average
PREFILL_ONLY_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)  # of work that only its pages are wanted of


class PrefillCosts:
    """What computing a prompt elsewhere costs against computing it where it is answered, as measured so far."""

    def __init__(self) -> None:
        self.token_s = 0.0  # seconds that a token of a prompt takes on a prefill replica
        self.handover_latency_s = 0.0  # seconds from the end of a prefill to the first token elsewhere

    @property
    def handover_tokens(self) -> float:
        """What of a hand-over is not hidden behind computing, as tokens computed meanwhile."""
        return self.handover_latency_s / self.token_s if self.token_s and self.handover_latency_s else FIXED_TOKENS

    def record_prefill(self, tokens: int, seconds: float) -> None:
        self.token_s = _average(self.token_s, seconds / max(1, tokens))

    def record_handover(self, seconds: float) -> None:
        self.handover_latency_s = _average(self.handover_latency_s, seconds)

    def should_prefill_remotely(self, need: int, decoder: Replica, prefill: Replica, held: int) -> bool:
        """`need`: tokens that the decoder would compute; `held`: of them, those that the prefill replica has. Computed
        where it is answered, a prompt waits behind others and delays whoever is being answered there."""
        if need <= MAX_LOCAL_PREFILL_TOKENS:
            return False
        local = decoder.load.tokens + need * (1 + decoder.load.requests)
        return prefill.load.tokens + need - held + self.handover_tokens < local


def _average(known: float, latest: float) -> float:
    return latest if not known else known + SMOOTHING * (latest - known)


class Handovers:
    def __init__(self, hub: ReplicaHub, replicas: Sequence[Replica], router: RequestRouter, timeout: float):
        """`timeout`: seconds without a page after which a replica computes what it waits for."""
        self._hub = hub
        self._replicas = replicas
        self._router = router
        self._timeout = timeout
        self._prefills: dict[str, InternalRequest] = {}  # by the request that waits for their pages
        self._ended: dict[str, float] = {}  # when the prefill of a request ended that has drawn nothing yet
        self.costs = PrefillCosts()

    # ---- roles ----------------------------------------------------------------------------------------------

    def set_role(self, replica: Replica, role: str) -> None:
        if role not in ROLES:
            raise InputError(f"a role is one of {', '.join(ROLES)}, not {role!r}", param="role")
        others = (one for one in self._replicas if one is not replica)
        if role == PREFILL and not any(one.is_ready and one.role != PREFILL for one in others):
            raise InputError("no other replica is ready to decode; give that role to one first", param="role")
        replica.role = role
        self.route()

    def route(self) -> None:
        """Replicas came, went or changed: prefill replicas take requests while nobody else does."""
        decoding = any(one.state is ReplicaState.READY and one.role != PREFILL for one in self._replicas)
        for replica in self._replicas:
            replica.routable = replica.role != PREFILL or not decoding

    # ---- prefill elsewhere ----------------------------------------------------------------------------------

    def offload(self, request: Request, decoder: Replica, cached: int) -> Request:
        """The request as the decoder gets it; its prompt may be under way elsewhere."""
        request = replace(request, handover=None) if request.handover is not None else request
        need = len(request.prompt) + len(request.outputs) - cached
        found = self._prefill_replica(request, decoder)
        if found is None or not _transferable(request):
            return request
        prefill, held = found
        if not self.costs.should_prefill_remotely(need, decoder, prefill, max(0, held - cached)):
            return request
        handover = Handover(secrets.token_hex(16), prefill.connector, self._timeout)
        self._prefills[request.id] = self.send(
            prefill, request, [*request.prompt, *request.outputs], Handover(handover.id), need - max(0, held - cached),
            lambda well: self._prefilled(request.id, well=well),
        )  # fmt: skip
        return replace(request, handover=handover)

    def _prefill_replica(self, request: Request, decoder: Replica) -> tuple[Replica, int] | None:
        """Where the prompt would be computed soonest, and how much of it is there."""
        if not decoder.connector or decoder.role == PREFILL:
            return None
        ready = [one for one in self._replicas if one.role == PREFILL and one.connector and one.is_ready]
        if not ready:
            return None
        held = self._router.held(request, [one.number for one in ready])
        best = min(ready, key=lambda one: one.load.tokens - held[one.number])
        return best, held[best.number]

    def send(
        self, replica: Replica, request: Request, tokens: list[int], handover: Handover | None, need: int,
        done: Callable[[bool], None],
    ) -> InternalRequest:  # fmt: skip
        """Have a replica compute tokens, or get their pages, for somebody else."""
        asked = Request(
            id=f"{request.id}+{secrets.token_hex(4)}",
            prompt=tokens,
            params=PREFILL_ONLY_PARAMS,
            handover=handover,
            priority=request.priority,
            tenant=request.tenant,
            weight=request.weight,
            salt=request.salt,
            lora=request.lora,
            background=request.background,
            deadline=request.deadline,
        )
        internal = InternalRequest(asked.id, replica, need, time.monotonic(), done, alone=not replica.load.tokens)
        replica.add_internal(internal)
        self._hub.send(replica.identity, Submit(asked))
        return internal

    def on_event(self, replica: Replica, event: TokenEvent) -> None:
        """An event of no request that anybody reads."""
        internal = replica.internal.get(event.request)
        if internal is not None and event.finish is not None:
            if not event.message and internal.alone and internal.tokens and replica.role == PREFILL:
                self.costs.record_prefill(internal.tokens, time.monotonic() - internal.began)
            replica.finish_internal(internal, well=not event.message)

    def _prefilled(self, request_id: str, *, well: bool) -> None:
        if self._prefills.pop(request_id, None) is not None and well:
            self._ended[request_id] = time.monotonic()

    def on_first_token(self, request_id: str) -> None:
        """A request has drawn its first token; a prefill that is still under way was not waited for."""
        if (ended := self._ended.pop(request_id, None)) is not None:
            self.costs.record_handover(time.monotonic() - ended)
        self.on_finished(request_id)

    def on_finished(self, request_id: str) -> None:
        """Nobody waits any more for what was computed for a request."""
        self._ended.pop(request_id, None)
        if (internal := self._prefills.pop(request_id, None)) is not None:
            self.abort(internal)

    def abort(self, internal: InternalRequest) -> None:
        self._hub.send(internal.replica.identity, Abort(internal.id))
        internal.replica.finish_internal(internal, well=False)


def _transferable(request: Request) -> bool:
    """Whether all KV of its prompt is what these tokens alone make of it, and none of its positions is looked at."""
    params = request.params
    plain = request.blend is None and request.beam is None and not request.pooling
    return plain and params.prompt_logprobs is None and params.kv_budget is None
