"""Who computes what in the next step: plan and commit, in plain Python over counts and pages.

Knows: types, memory. Refuses to know: tensors, text, processes, clocks (the caller says what time it is).
"""

from quire.scheduling.feature import SchedulingFeature
from quire.scheduling.length_predictor import LengthPredictor, OraclePredictor
from quire.scheduling.policies import POLICIES, Policy, make_policy
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.sequence import Sequence

__all__ = [
    "POLICIES",
    "LengthPredictor",
    "OraclePredictor",
    "Policy",
    "Scheduler",
    "SchedulingFeature",
    "Sequence",
    "make_policy",
]
