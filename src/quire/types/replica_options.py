"""Options of replicas: of a server's one model, or of one of several."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass

from quire.types.autoscaling import AutoscaleOptions
from quire.types.errors import ConfigError
from quire.types.option_checks import option

OF_HANDOVERS = ("prefill_replicas", "kv_connector", "switch_roles", "handover_timeout", "rebalance")
OF_REPLICAS = ("router", "replica_cpus", "replica_gpus", "replica_wait")


@dataclass(frozen=True)
class ReplicaOptions(AutoscaleOptions):
    """Replicas."""

    replicas: int | None = option(
        None,
        "engines of the model behind this server, started and watched by Ray (at first, with max_replicas or "
        "min_replicas); needs quire[ray]",
        low=1,
        high=1024,
        common=True,
    )
    router: str = option(
        "cache-aware",
        "which replica a request goes to: cache-aware, prefix, slo-aware, session, power-of-two, least-load or "
        "round-robin",
        forms=("cache-aware", "prefix", "slo-aware", "session", "power-of-two", "least-load", "round-robin"),
    )
    prefill_replicas: int = option(
        0, "of the replicas, those that compute prompts for the others, which answer (prefill-decode disaggregation)",
        low=0,
    )  # fmt: skip
    kv_connector: str = option(
        "auto",
        "how replicas hand KV pages over: tcp, shared-memory (on one machine), nixl (RDMA where there is any; needs "
        "quire[nixl]), none, or auto (tcp or shared-memory, by where they are)",
        forms=("auto", "tcp", "shared-memory", "nixl", "none"),
    )
    switch_roles: bool = option(True, "let prefill and decode replicas change roles as the load's shape changes")
    handover_timeout: float = option(
        10.0, "seconds without a page after which a replica computes what it waits for", above=0
    )
    rebalance: bool = option(True, "move running requests from replicas that have many to those that have few")
    ray_address: str | None = option(
        None, "Ray cluster to run replicas on, HOST:PORT or auto (default: a Ray of the server's own, on this machine)"
    )
    replica_cpus: float = option(1.0, "CPUs that Ray sets aside for a replica on a cluster", low=0)
    replica_gpus: float | None = option(
        None, "GPUs that Ray sets aside for a replica (default: one, or an equal part where there are fewer)", low=0
    )

    replica_wait: float = option(
        120.0, "seconds that a request waits for a replica to start while there is none", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        scaling = [field.name for field in dataclasses.fields(AutoscaleOptions)]
        for name in (*OF_REPLICAS, *OF_HANDOVERS, *scaling):
            if self.replicas is None and self._said(name):
                raise ConfigError(f"{name} has no effect without replicas")
        if self.replicas is not None:
            self.validate_initial(self.replicas)
            for name in ("router", *OF_HANDOVERS):
                if self.most_replicas == 1 and self._said(name):
                    raise ConfigError(f"{name} has no effect with one replica")
        if self.ray_address is None and self.replica_cpus != 1.0:
            raise ConfigError("replica_cpus has no effect without ray_address: this machine's cores are shared evenly")
        self._check_roles()

    def _said(self, name: str) -> bool:
        return bool(getattr(self, name) != ReplicaOptions.__dataclass_fields__[name].default)

    def _check_roles(self) -> None:
        if self.prefill_replicas and self.autoscales:
            raise ConfigError("prefill_replicas are a fixed number: leave out min_replicas and max_replicas")
        if self.prefill_replicas and self.prefill_replicas >= (self.replicas or 0):
            raise ConfigError("prefill_replicas must be fewer than replicas: some must answer")
        if not self.switch_roles and not self.prefill_replicas:
            raise ConfigError("switch_roles has no effect without prefill_replicas")
        if self.kv_connector == "none" and self.prefill_replicas:
            raise ConfigError("prefill_replicas have no effect with kv_connector none")
        if self.kv_connector == "shared-memory" and self.ray_address is not None:
            raise ConfigError(
                "kv_connector shared-memory is for replicas on this machine, not for ray_address; use tcp"
            )

    @property
    def most_replicas(self) -> int:
        """That there are at any time."""
        return self.max_replicas or self.replicas or 1

    @property
    def connector(self) -> str:
        """How replicas hand KV pages over; empty: they do not."""
        if self.kv_connector == "auto":
            return "tcp" if self.ray_address is not None or sys.platform != "linux" else "shared-memory"
        return "" if self.kv_connector == "none" else self.kv_connector
