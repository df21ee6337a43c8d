"""Scheduling policies, one file each, by the name that `--scheduler` takes; or any other by its import path."""

from __future__ import annotations

import importlib

from quire.scheduling.policies.auto import Auto
from quire.scheduling.policies.base import Policy
from quire.scheduling.policies.fair import Fair
from quire.scheduling.policies.fcfs import FCFS
from quire.scheduling.policies.lpm import LPM
from quire.scheduling.policies.mlfq import MLFQ
from quire.scheduling.policies.priority import Priority
from quire.scheduling.policies.sjf import SJF
from quire.scheduling.policies.slo import SLO
from quire.scheduling.policies.srpt import SRPT
from quire.scheduling.policies.static import Static
from quire.types.config import SchedulerOptions
from quire.types.errors import ConfigError

POLICIES: dict[str, type[Policy]] = {
    "fcfs": FCFS,
    "priority": Priority,
    "sjf": SJF,
    "srpt": SRPT,
    "mlfq": MLFQ,
    "lpm": LPM,
    "slo": SLO,
    "fair": Fair,
    "auto": Auto,
    "static": Static,
}

__all__ = ["FCFS", "POLICIES", "Fair", "Policy", "Priority", "Static", "make_policy"]


def make_policy(options: SchedulerOptions) -> Policy:
    """The policy that `options.scheduler` names: one of ours, or `package.module:Class` of the operator's own."""
    kind = POLICIES.get(options.scheduler) or _imported(options.scheduler)
    return kind(options)


def _imported(name: str) -> type[Policy]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"scheduler {name!r} cannot be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f"scheduler {name!r} is not a subclass of quire.scheduling.policies.Policy")
    return found
