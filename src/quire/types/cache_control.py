"""What operators ask of the KV cache, and the answer."""

from __future__ import annotations

import msgspec

from quire.types.events import TierStats


class CacheOrder(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`look`, or with the prompt whose pages are meant: `pin`, `drop`, `export`, `import`."""

    action: str = "look"
    tokens: list[int] = []
    salt: str = ""
    seconds: float = 0.0  # how long to pin
    tiers: list[str] = []  # where to drop: device and the tiers below; none named: everywhere
    data: bytes = b""  # of an import


class SessionView(msgspec.Struct):
    session: str
    pages: int
    seconds: float  # it is kept for so long yet


class CacheReport(msgspec.Struct, kw_only=True):
    """The cache as it is, and what an order came to."""

    pages: int = 0  # of the prompt that was named: pinned, dropped, exported or imported
    tokens: int = 0
    device_pages: int = 0
    device_used: int = 0
    device_cached: int = 0
    page_bytes: int = 0
    page_tokens: int = 0
    hit_rate: float = 0.0
    tiers: list[TierStats] = []
    rates: dict[str, float] = {}  # measured: bytes a second by way, tokens a second
    load_waits: float = 0.0  # seconds in which nothing else was there to compute while pages loaded
    saved_seconds: float = 0.0
    swaps: int = 0
    preemptions: int = 0
    sessions: list[SessionView] = []
