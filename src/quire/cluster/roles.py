"""Roles of replicas, and the two decisions that they ask for:

    a prompt: computed where it is answered, or by a prefill replica that hands its pages over?      PrefillCosts
    a pool:   has it so much more work a replica than the other that it gets one of the other's?     RoleBalancer

Work is in the router's own unit, tokens to be computed. The same objects decide in a cluster and in the simulator.
Refuses to know: links, clocks, how pages travel.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

from quire.cluster.router_policy import REQUEST_TOKENS, ReplicaLoad

PREFILL, DECODE, BOTH = "prefill", "decode", "both"
ROLES = (PREFILL, DECODE, BOTH)
FIXED_TOKENS = 128  # what a hand-over costs, in tokens computed meanwhile, until it was measured
# Prompts of which no more is to be computed stay: they delay a step by little, and hits are known by blocks only.
MAX_LOCAL_PREFILL_TOKENS = 128
SMOOTHING = 0.2  # share of the latest measurement in an average

WINDOW_S = 15.0  # whose median counts, and that is between one change and the next
MIN_WORK = 4 * REQUEST_TOKENS  # a replica, of the pool that gets another
MARGIN = 1.25  # times the other's work a replica, after the change


class PrefillCosts:
    """What computing a prompt elsewhere costs against computing it where it is answered, as measured so far."""

    def __init__(self) -> None:
        self.token_s = 0.0  # seconds that a token of a prompt takes on a prefill replica
        self.handover_latency_s = 0.0  # seconds from the end of a prefill to the first token elsewhere

    @property
    def handover_tokens(self) -> float:
        """What of a hand-over is not hidden behind computing, as tokens computed meanwhile."""
        return self.handover_latency_s / self.token_s if self.token_s and self.handover_latency_s else FIXED_TOKENS

    def record_prefill(self, tokens: int, seconds: float) -> None:
        self.token_s = _average(self.token_s, seconds / max(1, tokens))

    def record_handover(self, seconds: float) -> None:
        self.handover_latency_s = _average(self.handover_latency_s, seconds)

    def should_prefill_remotely(self, need: int, decoder: ReplicaLoad, prefill: ReplicaLoad, held: int) -> bool:
        """`need`: tokens that the decoder would compute; `held`: of them, those that the prefill replica has. Computed
        where it is answered, a prompt waits behind others and delays whoever is being answered there."""
        if need <= MAX_LOCAL_PREFILL_TOKENS:
            return False
        local = decoder.tokens + need * (1 + decoder.requests)
        return prefill.tokens + need - held + self.handover_tokens < local


def _average(known: float, latest: float) -> float:
    return latest if not known else known + SMOOTHING * (latest - known)


class PoolSample(NamedTuple):
    """Both pools at a moment."""

    prefill: int  # replicas
    decode: int
    prefill_work: float  # tokens of prompts that are not computed yet, of all of them
    decode_work: float  # ... and what requests under way cost


class RoleDecision(NamedTuple):
    role: str  # that a replica of the other pool is to have
    why: str


class RoleBalancer:
    """Which pool gets a replica of the other's. Only one that has clearly more work a replica even afterwards does, by
    the medians of the latest seconds: so a steady load never has replicas change back and forth."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, PoolSample]] = deque()

    def decide(self, now: float, sample: PoolSample) -> RoleDecision | None:
        """Called every second or so; None: all stay what they are."""
        samples = self._samples
        samples.append((now, sample))
        while len(samples) > 1 and samples[1][0] <= now - WINDOW_S:
            samples.popleft()
        if samples[0][0] > now - WINDOW_S or not (sample.prefill and sample.decode):
            return None
        prefill_work = median(one.prefill_work for _, one in samples)
        decode_work = median(one.decode_work for _, one in samples)
        found = None
        if sample.decode > 1 and _pays(prefill_work, sample.prefill, decode_work, sample.decode):
            found = PREFILL
        elif sample.prefill > 1 and _pays(decode_work, sample.decode, prefill_work, sample.prefill):
            found = DECODE
        if found is None:
            return None
        samples.clear()
        why = (
            f"{prefill_work / sample.prefill:.0f} tokens of prompts wait for each of {sample.prefill} prefill replicas"
        )
        also = f"what is under way costs each of {sample.decode} others as much as {decode_work / sample.decode:.0f}"
        return RoleDecision(found, f"{why}, {also}")


def _pays(work: float, replicas: int, others_work: float, others: int) -> bool:
    """Whether a pool is to get one of the other's replicas."""
    return work / replicas >= MIN_WORK and work / (replicas + 1) >= MARGIN * others_work / (others - 1)
