"""Options of autoscaling, which a server and a simulation share, and what the admin API shows of it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from quire.types.errors import ConfigError
from quire.types.option_checks import Checked, option

TUNING_OPTIONS = ("target_queue_delay", "target_attainment", "upscale_delay", "downscale_delay")


@dataclass(frozen=True)
class AutoscaleOptions(Checked):
    """Autoscaling."""

    min_replicas: int | None = option(
        None,
        "fewest replicas while the load asks for no more; 0: none while idle, a request starts one (default: replicas)",
        low=0,
        high=1024,
    )
    max_replicas: int | None = option(
        None, "most replicas while the load asks for them (default: replicas)", low=1, high=1024
    )
    target_queue_delay: float = option(
        1.0, "autoscaling: replicas are added while one in ten requests waits longer for admission, in seconds", above=0
    )
    target_attainment: float = option(
        0.95, "autoscaling: ... or while a smaller share of answers meets slo_ttft and slo_tpot", above=0, high=1
    )
    upscale_delay: float = option(5.0, "autoscaling: seconds that the load must ask for more replicas", low=0)
    downscale_delay: float = option(300.0, "autoscaling: seconds that it must ask for fewer", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        fields = AutoscaleOptions.__dataclass_fields__
        said = [name for name in TUNING_OPTIONS if getattr(self, name) != fields[name].default]
        if said and not self.autoscales:
            raise ConfigError(f"{said[0]} has no effect without max_replicas or min_replicas: nothing is scaled")

    @property
    def autoscales(self) -> bool:
        return self.min_replicas is not None or self.max_replicas is not None

    def validate_initial(self, replicas: int) -> None:
        """Whether so many at first are within the bounds."""
        low, high = self.min_replicas, self.max_replicas
        if (low is not None and low > replicas) or (high is not None and high < replicas):
            raise ConfigError(
                "replicas, which is how many there are at first, must be from min_replicas to max_replicas"
            )


class AutoscalingView(msgspec.Struct, kw_only=True):
    """What the autoscaler wants and why."""

    min_replicas: int
    max_replicas: int
    target: int  # replicas that it wants
    queue_delay_s: float  # that one in ten requests waited at least for admission
    slo_attainment: float | None  # share of the latest answers; None: there were too few
    reason: str  # of the latest change
