"""A request under way in a cluster: what its reader was given so far, and how it goes on on another replica.

    request (n branches) ──► sub-request on a replica ──(that is lost)──► one sub-request a branch that is open,
                                                elsewhere, with the tokens its reader has as known ones

Noise is a function of (seed, branch, position, token id), history and grammars are read from tokens: so the answer is
the one it would have been. Refuses to know: replicas, links.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from quire.engine.client import EventQueue
from quire.types.counts import Counts
from quire.types.events import TokenEvent
from quire.types.request import FinishReason, Request


@dataclass(eq=False, slots=True)
class SubRequest:
    """Branches of a request that one replica works on."""

    active: ActiveRequest
    request: Request  # as that replica has it
    branches: set[int]  # whose end has not come
    cached: int  # tokens that the replica is expected to hold
    started: bool = False  # something was drawn

    @property
    def remote_prefill(self) -> bool:
        return self.request.handover is not None

    @property
    def prefill(self) -> int:
        """Tokens that the replica must compute before it draws: none of a prompt that another computes for it."""
        return 0 if self.remote_prefill else len(self.request.prompt) + len(self.request.outputs) - self.cached


@dataclass(eq=False, slots=True)
class ActiveRequest:
    request: Request
    events: EventQueue
    outputs: list[list[int]] = field(default_factory=list)  # by branch: tokens that its reader has
    open: set[int] = field(default_factory=set)  # branches whose end its reader has not
    stopped: set[int] = field(default_factory=set)  # ... of them, ended by their reader at a stop string
    aborted: bool = False  # nothing of it is to go on
    counted: set[int] = field(default_factory=set)  # branches that said what of the prompt was cached
    scored: bool = False  # log-probabilities of the prompt were given
    sub_requests: dict[str, SubRequest] = field(default_factory=dict)  # by the ids that replicas know them by
    failovers: int = 0  # replicas that were lost under it
    deaths: int = 0  # ... of them, those whose process is known to have ended
    link_losses: int = 0  # connections to replicas that were lost under it
    _resumed: int = 0

    @classmethod
    def begun(cls, request: Request, events: EventQueue) -> ActiveRequest:
        active = cls(request, events)
        active.outputs = [[] for _ in range(request.params.n)]
        active.open = set(request.branches)
        return active

    def sub_request(self, request: Request, cached: int) -> SubRequest:
        made = SubRequest(self, request, set(request.branches), cached)
        self.sub_requests[request.id] = made
        return made

    def take(self, sub_request: SubRequest, event: TokenEvent) -> TokenEvent | None:
        """An event as the reader of the whole request sees it; None if there is nothing new in it."""
        branch = event.branch
        if event.finish is not None:
            sub_request.branches.discard(branch)
            if not sub_request.branches:
                del self.sub_requests[sub_request.request.id]
        if branch not in self.open:
            return None
        known = self.outputs[branch]
        if event.index < len(known):  # tokens the reader has
            again = len(known) - event.index
            event.tokens = event.tokens[again:]
            event.logprobs = event.logprobs[again:] if event.logprobs else None
            event.index = len(known)
            if event.forced and event.counts is not None:
                event.forced = [index - again for index in event.forced if index >= again]
                event.counts = replace(event.counts, forced=len(event.forced))
        if event.tokens:
            known += event.tokens
        if (counts := event.counts) is not None:
            if branch in self.counted and sub_request.request.id != self.request.id:  # said by the replica it began on
                event.counts = Counts(0, 0, counts.evicted, counts.forced, counts.drafted, counts.accepted)
            self.counted.add(branch)
        if event.prompt_logprobs is not None:
            event.prompt_logprobs = None if self.scored else event.prompt_logprobs
            self.scored = True
        if event.finish is not None:
            self.open.discard(branch)
        event.request = self.request.id
        return event

    def ended(self) -> list[TokenEvent]:
        """Ends of branches that their reader stopped and whose replica cannot say so any more."""
        return self._end(self.stopped, FinishReason.STOP)

    def given_up(self, request: Request) -> list[TokenEvent]:
        """Ends of branches that were aborted and that no replica has."""
        return self._end(request.branches, FinishReason.ABORT)

    def _end(self, branches: Iterable[int], reason: FinishReason) -> list[TokenEvent]:
        over = sorted(self.open.intersection(branches))
        self.open.difference_update(over)
        return [TokenEvent(self.request.id, branch, len(self.outputs[branch]), [], finish=reason) for branch in over]

    def resumed(self, sub_request: SubRequest) -> list[Request]:
        """What another replica must be asked so that the branches go on behind what their reader has."""
        del self.sub_requests[sub_request.request.id]
        left = sorted(sub_request.branches & self.open)
        whole = sub_request.request.beam is not None or bool(sub_request.request.pooling)
        if left and (whole or (len(left) == sub_request.request.params.n and not any(self.outputs[b] for b in left))):
            return [self._again(sub_request.request)]
        return [self._branch(branch) for branch in left]

    def _again(self, request: Request) -> Request:
        self._resumed += 1
        return replace(request, id=f"{self.request.id}~{self._resumed}")

    def _branch(self, branch: int) -> Request:
        outputs, params = list(self.outputs[branch]), self.request.params
        scores = None if outputs or self.scored else params.prompt_logprobs
        alone = replace(params, n=1, best_of=None, prompt_logprobs=scores)
        return self._again(replace(self.request, branch=branch, outputs=outputs, params=alone))
