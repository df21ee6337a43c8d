"""What a caller may ask of beam search, validated once, on arrival."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from quire.types.errors import InputError
from quire.types.sampling_params import MAX_LOGPROBS

MAX_BEAMS = 32


class BeamParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The `beams` likeliest answers are followed side by side, and the best `n` of those that ended are returned.

    An answer's score is the sum of its log-probabilities over its length to the power of `length_penalty`: above 0
    favours long answers, below 0 short ones. The search ends with `early_stopping` as soon as there are `beams`
    answers, without it when no running beam looks able to beat the worst of them, with "never" when none possibly can.

    With `groups`, beams are searched in so many groups one after another, and a token costs a group `diversity` for
    each time that an earlier group has chosen it in the same step.
    """

    beams: int = 4
    n: int = 1
    max_tokens: int = 64
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    groups: int = 1
    diversity: float = 0.0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (("beams", 1, MAX_BEAMS), ("n", 1, self.beams), ("max_tokens", 1, 1 << 30)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise InputError(f"{name} must be a whole number from {low} to {high}, got {value!r}", param=name)
        if self.groups < 1 or self.beams % self.groups:
            raise InputError(f"{self.beams} beams cannot be cut into {self.groups} equal groups", param="groups")
        if not 0.0 <= self.diversity <= 100.0:
            raise InputError(f"diversity must be in [0, 100], got {self.diversity!r}", param="diversity")
        if self.groups == 1 and self.diversity:
            raise InputError("diversity is between groups: ask for more than one", param="diversity")
        if not math.isfinite(self.length_penalty) or abs(self.length_penalty) > 10:
            message = f"length_penalty must be in [-10, 10], got {self.length_penalty!r}"
            raise InputError(message, param="length_penalty")

    def candidates(self, ends: int) -> int:
        """Continuations to look at per beam: enough to go on with when all the best ones end (there are `ends` tokens
        that do), and when all tokens chosen by other groups have become too expensive."""
        count = max(2, 1 + ends) * (self.beams // self.groups) + (self.beams if self.groups > 1 else 0)
        if count > MAX_LOGPROBS:
            raise InputError(f"{self.beams} beams with {ends} end tokens are too many for one search", param="beams")
        return count
