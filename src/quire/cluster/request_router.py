"""Requests to a router policy: names of their blocks, and what replicas tell of theirs.

Blocks are named by the hashes that replicas name pages by, every so many of a prompt's chain, so that cache events
speak of the same names. Refuses to know: links, which policy decides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from quire.cluster.router_policy import ReplicaLoad, RouterPolicy, RouteView
from quire.types.hashing import PageHasher, new_key
from quire.types.messages import CacheEvents, Ready
from quire.types.request import Request

log = logging.getLogger(__name__)

BLOCK_TOKENS = 64  # that are named together, or a page where that has more
TRIAL_TOKENS = 1 << 16  # that a replica must have been expected to hold before it is judged by what it held
MIN_FOUND = 0.5  # share of them that must have been there


class RequestRouter:
    def __init__(self, policy: RouterPolicy, targets: tuple[float, float] = (0.0, 0.0)):
        """`targets`: for the first token and for each token, in seconds, of requests that have none of their own."""
        self._policy = policy
        self._targets = targets
        self._directory = policy.directory
        self.page_key = new_key()  # of the names of pages
        self.block_tokens = BLOCK_TOKENS
        self._block_pages = 1
        self._hasher: PageHasher | None = None
        self._expected = [0] * policy.replicas  # tokens that requests were sent for, and
        self._found = [0] * policy.replicas  # ... those that were there

    def choose(self, request: Request, loads: Sequence[ReplicaLoad]) -> tuple[int, int]:
        """The replica's number, and how many tokens of the request it is expected to hold."""
        return self._policy.choose(self._view(request, self._blocks(request)), loads), self._policy.saved

    def moved(self, request: Request, number: int) -> None:
        """It goes on on that replica, which has its pages."""
        self._policy.moved(self._view(request, ()), number)

    def _view(self, request: Request, blocks: Sequence[bytes]) -> RouteView:
        tokens = len(request.prompt) + len(request.outputs)
        ttft, tpot = request.slo_ttft or self._targets[0], request.slo_tpot or self._targets[1]
        return RouteView(tokens, blocks, request.tenant, request.session, request.id, time.monotonic(), ttft, tpot)

    def held(self, request: Request, numbers: Sequence[int]) -> dict[int, int]:
        """How many of a request's tokens these replicas are known to hold."""
        found = dict.fromkeys(numbers, 0)
        matches = self._directory.match(self._blocks(request)) if self._directory is not None else []
        size = self._hasher.tokens_per_page * self._block_pages if self._hasher is not None else 0
        for number in numbers:
            found[number] = next((one.blocks * size for one in matches if one.replicas >> number & 1), 0)
        return found

    def _blocks(self, request: Request) -> list[bytes]:
        if self._hasher is None:
            return []
        salt = request.salt.replace("\0", "\0\0")  # as an engine does before it adds an adapter's digest
        root = self._hasher.root(f"{salt}\0{request.lora}" if request.lora else salt)
        names = self._hasher.chain(root, request.prompt + request.outputs)
        return names[self._block_pages - 1 :: self._block_pages]

    def offloaded(self, request_id: str) -> None:
        self._policy.offloaded(request_id)

    def first_token(self, request_id: str) -> None:
        self._policy.first_token(request_id, time.monotonic())

    def ended(self, request_id: str, tokens: int) -> None:
        """Its replica has nothing to do with it any more; `tokens`: that it drew there, none of one that was lost."""
        self._policy.ended(request_id, time.monotonic(), tokens)

    def joined(self, number: int, ready: Ready) -> None:
        """A replica is there: how its pages are named, and how many blocks it holds at most."""
        if self._directory is None or not ready.info.prefix_cache:
            return
        if self._hasher is None:
            size = ready.page_tokens or ready.info.page_size
            self._block_pages = max(1, self.block_tokens // size)
            self._hasher = PageHasher(self.page_key, size)
        held = max(1, ready.info.pages // self._block_pages)
        self._directory.resize(number, 2 * held if ready.page_tokens else held)  # events come a bit later

    def left(self, number: int) -> None:
        if self._directory is not None:
            self._directory.forget(number)
        self._expected[number] = self._found[number] = 0

    def learn(self, number: int, news: CacheEvents) -> None:
        """What entered and left a replica's cache."""
        if self._directory is not None:
            if news.cleared:
                self._directory.forget(number)
            self._directory.remove(number, news.removed)
            self._directory.add(number, news.stored)

    def found(self, number: int, expected: int, cached: int) -> None:
        """A request was expected to find so many tokens cached, and found so many. A replica that keeps holding much
        less than is known of it drops out of the directory."""
        self._expected[number] += expected
        self._found[number] += min(expected, cached)
        if self._expected[number] >= TRIAL_TOKENS:
            if self._found[number] < MIN_FOUND * self._expected[number]:
                log.warning("replica %d holds little of what is known of it: its prefixes are forgotten", number)
                self.left(number)
            self._expected[number] = self._found[number] = 0
