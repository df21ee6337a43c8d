"""An executor on a CPU that launches steps before what they may draw is known, as one on a GPU does. What a step leaves
is gone when the next is launched, as with captured ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace

from quire.generation.drafting.speculation import ExpandedPlan
from quire.runtime.capture import CapturedSteps, StepOutput, pad_table
from quire.runtime.executors.local_executor import LocalExecutor
from quire.runtime.staging import Ints, Staging
from quire.runtime.worker import ForwardOutput, ForwardWorker


class OverwritingWorker(ForwardWorker):
    late = 0  # samples that were drawn behind their step
    _logits: torch.Tensor | None = None  # of the latest step

    def forward(self, expanded: ExpandedPlan, *, draws: bool) -> ForwardOutput:
        if self._logits is not None:
            self._logits.fill_(torch.nan)
        output = super().forward(expanded, draws=draws)
        self._logits = output.logits
        self.late += len(expanded.late)
        return output


class CapturingWorker(OverwritingWorker):
    """Steps of one token a row go the way of captured ones: padded, draws among them, outputs in one place."""

    replays = mixed = 0  # captured steps, and of them those that drew some samples and left some for later

    def _captures(self, decode: Callable[..., StepOutput], sharing: Any) -> CapturedSteps:
        steps = super()._captures(decode, sharing)
        return ReplayedSteps(steps, decode, self.slots.null_slot)

    def _replay(self, expanded: ExpandedPlan, *args: Any) -> ForwardOutput:
        output = super()._replay(expanded, *args)
        self.replays += 1
        self.mixed += output.drawn is not None and output.logits is not None
        if output.drawn is not None:  # a GPU copies them to the host, in the order of what is launched
            output.drawn = output.drawn.clone()
        return output


class ReplayedSteps(CapturedSteps):
    ready = True

    def __init__(self, like: CapturedSteps, decode: Callable[..., StepOutput], null_slot: int):
        self.__dict__ |= like.__dict__
        self.mixed_sizes = []
        self._decode, self._null = decode, null_slot
        self._kept: dict[tuple[int, int], StepOutput] = {}

    def replay(self, size: tuple[int, int], table: Ints, staging: Staging) -> StepOutput:
        rows = pad_table(table, size, self._null)
        kv_lens = (rows[1] - rows[3] + rows[2]).tolist()
        found = self._decode(torch.from_numpy(rows), size[0], [1] * size[1], kv_lens, None)
        kept = self._kept.setdefault(size, found)
        for name in ("logits", "drawn", "hidden"):
            getattr(kept, name).copy_(getattr(found, name))
        return kept


class LaunchingAhead(LocalExecutor):
    worker: type[ForwardWorker] = OverwritingWorker

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._capacity = replace(self._capacity, late_draws=self._capacity.depth > 1)

    def _new_worker(self) -> ForwardWorker:
        return self.worker(self.model, self.layout, self._capacity, self._device)
