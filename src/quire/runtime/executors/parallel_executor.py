"""The parallel executor: rank 0 in this process, the other ranks in processes of their own on this machine.

    plan ──► rank 0: drafts, masks ──► Forward to all ranks ──► forward on each, added up between layers ──► logits
                                                                                                               │
         all ranks: tokens stored in their slots ◄── broadcast ◄── rank 0: samples ◄───────────────────────────┘

Every rank keeps slots and page tables as rank 0 does, and pages with its own KV heads (tensor parallelism), layers
(stages of a pipeline, of which rank 0 is the first) or tokens (context parallelism). A failure leaves ranks out of step
with each other, so that it ends the engine. Refuses to know: how a model is divided (`model/parallel.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.generation.drafting.speculation import ExpandedPlan
from quire.model import Runnable, read_spec
from quire.model.parallel import describe_parallel
from quire.runtime.capacity import capacity_for
from quire.runtime.executors.local_executor import LocalExecutor
from quire.runtime.executors.rank_group import RankGroup, join_ranks
from quire.runtime.executors.rank_messages import (
    Forward,
    KeepBranch,
    KeepState,
    RankJoined,
    RankReady,
    RankStarted,
    StartRank,
    StoreSamples,
)
from quire.runtime.executors.rank_processes import RankProcesses
from quire.runtime.hardware import probe, resolve
from quire.runtime.rank_options import check_ranks, rank_options
from quire.runtime.step_result import PendingStep
from quire.runtime.worker import ForwardOutput, ForwardWorker
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError, QuireError
from quire.types.grammar import Vocabulary
from quire.types.kv import KVLayout
from quire.types.membership import PeerLink
from quire.types.memory_use import resident_bytes
from quire.types.plan import Capacity, StepPlan
from quire.types.seams import WeightSource


class ParallelExecutor(LocalExecutor):
    def __init__(
        self,
        options: EngineOptions,
        source: WeightSource,
        *,
        vocabulary: Callable[[int], Vocabulary],
        progress: bool = False,
    ):
        hardware = probe(options.device.device)
        check_ranks(read_spec(source), options, hardware)
        every = rank_options(options, hardware)
        self._processes = RankProcesses(every[1:])
        try:
            self._processes.receive(RankJoined)
            device = torch.device(probe(every[0].device.device).device)
            self._group = join_ranks(self._processes.directory / "store", 0, every[0].device, device)
            self._processes.when_one_dies(self._group.abort)
            super().__init__(every[0], source, vocabulary=vocabulary, progress=progress, ranks=self._group)
            ready = self._processes.receive(RankReady)
            self._others_page_bytes = sum(one.page_bytes for one in ready)
            self._fit(every[0], min(one.pages for one in ready))
        except QuireError:
            self._processes.close()
            raise
        except Exception as error:
            failure = self._processes.error(f"{type(error).__name__}: {error}")
            self._processes.close()
            raise failure from error
        spec, itemsize = read_spec(source), self.model.dtype.itemsize
        self._reasons.append(describe_parallel(spec, options.device, itemsize, self._group.backend))

    def connect(self, peers: PeerLink) -> None:
        """A rank has a part of every page, and only the first could hand over its own: prompts are computed again."""

    def _fit(self, options: EngineOptions, pages: int) -> None:
        """On GPUs, no more pages than the fullest of them has room for; ranks on CPUs share one memory."""
        if self._device.type == "cuda" and pages < self._capacity.pages:
            fewer, hardware = options.but(kv_pages=pages - 1), probe(str(self._device))
            self._capacity, why = capacity_for(fewer, resolve(fewer, hardware), self.layout, self.model, None)
            self._reasons.append(f"{why}, on the fullest GPU")

    def _new_worker(self) -> ForwardWorker:
        self._processes.send(StartRank(self._capacity))
        worker = LeadingWorker(self._processes, self._group, self.model, self.layout, self._capacity, self._device)
        self._processes.receive(RankStarted)
        return worker

    def check(self) -> None:
        if self._processes.dead:
            raise self._processes.error("")

    def idle(self, *, quiet: bool) -> bool:
        return False

    def _run(self, plan: StepPlan) -> PendingStep:
        self.check()
        before = self._group.sent
        try:
            step = super()._run(plan)
        except Exception as error:  # ranks may be anywhere in the step by now
            raise self._processes.error(f"{type(error).__name__}: {error}") from error
        step.exchanged_bytes = self._group.sent - before
        return step

    def rank_memory(self) -> tuple[int, int]:
        return self._capacity.pages * self._others_page_bytes, sum(map(resident_bytes, self._processes.pids))

    def sleep(self, pages: list[int], level: int) -> None:
        raise ConfigError("sleeping is for engines of one process")

    def read_pages(self, pages: list[int]) -> list[bytes]:
        raise ConfigError("KV pages are divided between ranks, and cannot be exported")

    def write_pages(self, pages: list[int], content: list[bytes]) -> None:
        raise ConfigError("KV pages are divided between ranks, and cannot be imported")

    def close(self) -> None:
        super().close()
        self._processes.close()


class LeadingWorker(ForwardWorker):
    """Rank 0's: what is done to it is done to those of all ranks."""

    def __init__(
        self,
        processes: RankProcesses,
        group: RankGroup,
        model: Runnable,
        layout: KVLayout,
        capacity: Capacity,
        device: torch.device,
    ):
        super().__init__(model, layout, capacity, device, ranks=group)
        self._processes = processes
        self._group = group

    def forward(self, expanded: ExpandedPlan, *, draws: bool) -> ForwardOutput:
        self._processes.send(Forward(expanded.plan, expanded.tree_rows))
        return super().forward(expanded, draws=draws)

    def store(self, slots: list[int], positions: list[int], token_ids: torch.Tensor) -> None:
        if not self._group.pipeline:  # later stages are given hidden states, and know no tokens
            self._processes.send(StoreSamples(slots, positions))
            self._group.broadcast(token_ids.long().contiguous())
        super().store(slots, positions, token_ids)

    def keep_branch(self, slot: int, position: int, tokens: list[int], indices: list[int]) -> None:
        self._processes.send(KeepBranch(slot, position, tokens, indices))
        super().keep_branch(slot, position, tokens, indices)

    def keep_state(self, slot: int, accepted: int) -> None:
        self._processes.send(KeepState(slot, accepted))
        super().keep_state(slot, accepted)
