"""Prefill-decode disaggregation: which prompts another replica computes, and what is arranged for their pages.

    request ──► the router's replica (decode) ──── waits for pages, or computes what does not come
         └────► a prefill replica: computes the prompt, hands each page over as it is done, says nothing

A prompt is computed elsewhere where that is predicted to cost less: in tokens to be computed one after the other, by
whom it delays. Replicas of the prefill role take no requests while any other is ready; when none is, they do. Refuses
to know: Ray, how pages travel.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from math import inf

from msgspec.structs import replace

from quire.cluster.active_request import SubRequest
from quire.cluster.replica_handle import InternalRequest, Replica, ReplicaState
from quire.cluster.replica_hub import ReplicaHub
from quire.cluster.request_router import RequestRouter
from quire.cluster.roles import PREFILL, ROLES, PrefillCosts
from quire.types.counts import Counts
from quire.types.errors import InputError
from quire.types.events import TokenEvent
from quire.types.handover import Handover
from quire.types.messages import Abort, Submit
from quire.types.request import ENDED_WELL, Request
from quire.types.sampling_params import SamplingParams

log = logging.getLogger(__name__)

RETRY_S = 10.0  # before a prompt is computed elsewhere again, after pages did not come from there
PREFILL_ONLY_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)  # of work that only its pages are wanted of


class Handovers:
    def __init__(self, hub: ReplicaHub, replicas: Sequence[Replica], router: RequestRouter, timeout: float):
        """`timeout`: seconds without a page after which a replica computes what it waits for."""
        self._hub = hub
        self._replicas = replicas
        self._router = router
        self._timeout = timeout
        self._prefills: dict[str, InternalRequest] = {}  # by the request that waits for their pages
        self._ended: dict[str, float] = {}  # when the prefill of a request ended that has drawn nothing yet
        self._failed: dict[tuple[str, str], float] = {}  # when pages did not come from one address to another
        self.costs = PrefillCosts()

    # ---- roles ----------------------------------------------------------------------------------------------

    def check_role(self, replica: Replica, role: str) -> None:
        if role not in ROLES:
            raise InputError(f"a role is one of {', '.join(ROLES)}, not {role!r}", param="role")
        others = (one for one in self._replicas if one is not replica)
        if role == PREFILL and not any(one.is_ready and one.role != PREFILL for one in others):
            raise InputError("no other replica is ready to decode; give that role to one first", param="role")

    def set_role(self, replica: Replica, role: str) -> None:
        self.check_role(replica, role)
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
        if not self.costs.should_prefill_remotely(need, decoder.load, prefill.load, max(0, held - cached)):
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
        ready = [one for one in self._replicas if self._hands_over(one, decoder)]
        if not ready:
            return None
        held = self._router.held(request, [one.number for one in ready])
        best = min(ready, key=lambda one: one.load.tokens - held[one.number])
        return best, held[best.number]

    def _hands_over(self, prefill: Replica, decoder: Replica) -> bool:
        if prefill.role != PREFILL or not prefill.connector or not prefill.is_ready:
            return False
        return time.monotonic() - self._failed.get((prefill.connector, decoder.connector), -inf) > RETRY_S

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
            well = event.finish in ENDED_WELL
            if well and internal.alone and internal.tokens and replica.role == PREFILL:
                self.costs.record_prefill(internal.tokens, time.monotonic() - internal.began)
            replica.finish_internal(internal, well=well)

    def _prefilled(self, request_id: str, *, well: bool) -> None:
        if self._prefills.pop(request_id, None) is not None and well:
            self._ended[request_id] = time.monotonic()

    def on_first_token(self, sub_request: SubRequest, decoder: Replica, counts: Counts | None) -> None:
        """A request has drawn its first token; a prefill that is still under way was not waited for."""
        request, now = sub_request.request, time.monotonic()
        ended = self._ended.pop(request.id, None)
        if request.handover is not None and counts is not None:
            missing = len(request.prompt) - counts.cached
            if 2 * missing > len(request.prompt) - sub_request.cached:  # most of what it waited for
                source = request.handover.source
                log.warning(
                    "KV pages of %s did not come to %s: it computes prompts itself for a while", source, decoder.id
                )
                self._failed = {pair: then for pair, then in self._failed.items() if now - then <= RETRY_S}
                self._failed[source, decoder.connector] = now
            elif ended is not None:
                self.costs.record_handover(now - ended)
        self.on_finished(request.id)

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
