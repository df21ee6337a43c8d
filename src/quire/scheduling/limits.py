"""What a request must be to be accepted, and when it must be done: refusals with reasons, and deadlines.

Refuses to know: queues, plans.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable

from quire.memory.manager import KVManager
from quire.scheduling.beam_search import check_fits
from quire.scheduling.features.blend_reuse import check_blend
from quire.scheduling.features.kv_eviction import KVBudget
from quire.types.errors import ContextLengthError, InputError
from quire.types.plan import Capacity
from quire.types.pooling import ENCODER
from quire.types.request import Request


def check_request(request: Request, memory: KVManager, capacity: Capacity, budget: KVBudget | None) -> int:
    """Tokens that prompt and answer may come to; refuses, with a reason, what could never run."""
    length, longest = len(request.prompt), capacity.max_model_len if budget else capacity.longest
    if length == 0:
        raise InputError("the prompt is empty; send at least one token", param="prompt")
    if capacity.whole and not request.pooling:
        raise InputError(ENCODER)
    if capacity.whole and length > longest:
        raise ContextLengthError(f"the input has {length} tokens but the model takes {longest}; shorten it")
    if length >= longest and not capacity.whole:
        longer = "raise max_model_len" if length >= capacity.max_model_len else "set kv_budget"
        raise ContextLengthError(
            f"the prompt has {length} tokens but the context holds {longest}, one of them for the answer; "
            f"shorten the prompt or {longer}"
        )
    limit = min(longest + capacity.whole, length + (1 if request.pooling else request.params.max_tokens or longest))
    if request.outputs and (request.params.n > 1 or request.beam or request.pooling):
        raise InputError("outputs continue one answer: n must be 1, without beam search or pooling", param="outputs")
    if request.outputs and request.params.prompt_logprobs is not None:
        problem = "outputs continue an answer whose prompt_logprobs came with its first token; leave them out"
        raise InputError(problem, param="prompt_logprobs")
    if length + len(request.outputs) >= limit:
        raise InputError(f"all {limit - length} tokens of the answer are drawn already", param="outputs")
    if memory.layout.pages_for(min(limit, budget.peak) if budget else limit) > memory.pool.total:
        raise ContextLengthError(
            f"prompt and answer may need {limit} tokens, more than the whole KV pool holds "
            f"({memory.pool.total} pages); lower max_tokens or raise kv_memory"
        )
    if request.beam is not None:
        check_fits(request, request.beam, limit, memory, capacity.slots)
    if request.blend is not None:
        check_blend(request, request.blend, memory, capacity)
    return limit


class Deadlines:
    """Requests by when they must be done; those that finished in time go when there are too many of them."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request, live: Iterable[Request], count: int) -> None:
        """`live`: all `count` requests that are not over."""
        heapq.heappush(self._heap, (request.deadline, request.id))
        if len(self._heap) > 64 + 2 * count:
            self._heap = sorted((r.deadline, r.id) for r in live if r.deadline)

    def due(self, now: float, live: Container[str]) -> list[tuple[float, str]]:
        """(deadline, request) of live requests that are out of time."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            deadline, request_id = heapq.heappop(self._heap)
            if request_id in live:
                found.append((deadline, request_id))
        return found
