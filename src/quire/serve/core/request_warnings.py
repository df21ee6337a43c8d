"""What a caller should know of a request that is answered all the same: told in a header of the response.

Refuses to know: HTTP.
"""

from __future__ import annotations

from contextvars import ContextVar

MAX_WARNINGS, MAX_CHARS = 8, 300

_warnings: ContextVar[list[str]] = ContextVar("quire-warnings")


def collect() -> list[str]:
    """Warnings of the request that begins here, as they come."""
    found: list[str] = []
    _warnings.set(found)
    return found


def warn(message: str) -> None:
    """Of the request under way; outside of one, nobody hears it."""
    found = _warnings.get(None)
    if found is not None and len(found) < MAX_WARNINGS and message not in found:
        found.append(message[:MAX_CHARS])


def header_value(warnings: list[str]) -> bytes:
    """One line that a header may hold."""
    plain = "; ".join(" ".join(message.split()) for message in warnings)
    return plain.encode("ascii", "backslashreplace")
