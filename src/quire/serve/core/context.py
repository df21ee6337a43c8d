"""Who asks, and under which name: what is known of a request before its body is read.

It travels in a context variable rather than through every signature: each API family ends in the same
`Generation`, which applies salt, deadline and price for all of them, so that no family can forget to.
Refuses to know: bodies, engines but for a hold on the one that is to answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.serve.core.api_keys import OPEN_KEY, Key

if TYPE_CHECKING:
    from quire.engine.model_pool import Lease
    from quire.serve.core.rate_limits import Permit


@dataclass
class Context:
    """One request on its way in. `permit` is there where the route does work that limits apply to."""

    request_id: str
    key: Key
    salt: str = ""  # of the key; prefixes are shared within it
    permit: Permit | None = None
    lease: Lease | None = None  # of the model that answers; none: the default, or it is not known yet
    lora: str = ""  # the adapter that answers; empty: the model itself
    session: str = ""  # whose pages stay for a while after the answer
    hold: float = 0.0  # ... so many seconds
    slo: tuple[float, float] = (0.0, 0.0)  # targets in seconds: time to first token, time per token; 0: none of its own
    traceparent: str = ""  # of the caller's trace, as W3C writes it
    strict_fields: bool = False  # refuse fields that nobody here knows
    ignored: set[str] = field(default_factory=set)  # ... those that were left out instead
    # Does work unless the client hangs up first, once its body was read; none: the work is for nobody who could.
    until_gone: Callable[[Coroutine[Any, Any, None]], Coroutine[Any, Any, None]] | None = None

    def release_model(self) -> None:
        """The answer has ended: its model may be unloaded."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    def salted(self, given: str) -> str:
        """The salt of an engine request: the key's own, and within it the caller's."""
        if not self.salt:
            return given
        return hashlib.blake2b(f"{self.salt}\0{given}".encode(), digest_size=16).hexdigest()


_CURRENT: ContextVar[Context] = ContextVar("quire_context")


def enter(context: Context) -> None:
    """Make `context` that of the running task and of tasks it starts."""
    _CURRENT.set(context)


def current() -> Context:
    """The context of the request being handled; an open one where none was set (work the server starts itself)."""
    return _CURRENT.get(None) or Context("", OPEN_KEY)
