"""Router policies by name: which replica a request goes to."""

from __future__ import annotations

from quire.cluster.load_routers import LeastLoad, PowerOfTwo, RoundRobin, SessionAffinity
from quire.cluster.prefix_directory import DEFAULT_CAPACITY
from quire.cluster.prefix_routers import CacheAware, PrefixAware
from quire.cluster.router_policy import RouterPolicy
from quire.cluster.slo_router import SloAware
from quire.types.errors import ConfigError

ROUTERS: dict[str, type[RouterPolicy]] = {
    "cache-aware": CacheAware,
    "prefix": PrefixAware,
    "slo-aware": SloAware,
    "session": SessionAffinity,
    "power-of-two": PowerOfTwo,
    "least-load": LeastLoad,
    "round-robin": RoundRobin,
}


def router_named(name: str) -> type[RouterPolicy]:
    if name not in ROUTERS:
        raise ConfigError(f"router must be one of {', '.join(ROUTERS)}, got {name!r}")
    return ROUTERS[name]


def make_router(name: str, replicas: int, seed: int = 0, capacity: int = DEFAULT_CAPACITY) -> RouterPolicy:
    return router_named(name)(replicas, seed, capacity)
