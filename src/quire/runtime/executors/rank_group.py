"""Collectives between the ranks of one engine: gloo over loopback on CPUs, NCCL on GPUs.

The ranks find each other through a file in a directory that nobody else can read. Refuses to know: what is exchanged,
who starts the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from quire.types.config import DeviceOptions

COLLECTIVE_TIMEOUT_S = 120.0  # that a rank waits for the others: all begin a step at the same time


class RankGroup:
    """`sent` counts the bytes that this rank sends, as rings of ranks do it: 2 (n - 1) / n of what is added up, n - 1
    times what is gathered, all that goes to the next stage or in a transfer."""

    tensor: RankGroup | None = None

    def __init__(
        self,
        store: Path,
        rank: int,
        size: int,
        device: torch.device,
        *,
        pipeline: bool = False,
        context: bool = False,
        whole_experts: bool = False,
    ):
        self.rank = rank
        self.size = size
        self.pipeline = pipeline
        self.context = context
        self.whole_experts = whole_experts
        self.heads_apart = pipeline or (context and rank > 0)  # it has no logits to compute
        self._device = device
        self._transfers = 0
        self._sent = 0
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        files = dist.FileStore(str(store), size)
        files.set_timeout(timeout)
        self._group: Any
        if device.type == "cuda":
            torch.cuda.set_device(device)
            nccl: Any = dist.ProcessGroupNCCL
            settings = nccl.Options()
            settings._timeout = timeout
            self._group, self.backend = nccl(files, rank, size, settings), "NCCL"
        else:
            gloo: Any = dist.ProcessGroupGloo
            settings = gloo._Options()
            settings._devices = [gloo.create_device(hostname="127.0.0.1")]
            settings._timeout = timeout
            self._group, self.backend = gloo(files, rank, size, settings), "gloo"

    @property
    def sent(self) -> int:
        return self._sent

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        self._sent += 2 * (self.size - 1) * x.nbytes // self.size
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x]).wait()
        self._sent += (self.size - 1) * x.nbytes
        return torch.cat(parts, dim=1)

    def broadcast(self, x: torch.Tensor) -> None:
        """From rank 0 to all others, in place."""
        self._group.broadcast([x], dist.BroadcastOptions()).wait()
        self._sent += (self.size - 1) * x.nbytes if self.rank == 0 else 0

    def send(self, x: torch.Tensor) -> None:
        x = x.contiguous()
        self._group.send([x], (self.rank + 1) % self.size, 0).wait()
        self._sent += x.nbytes

    def receive(self, into: torch.Tensor) -> torch.Tensor:
        self._group.recv([into], (self.rank - 1) % self.size, 0).wait()
        return into

    def transfer(self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> Callable[[], None]:
        self._transfers += 1
        tag, nccl = self._transfers % (1 << 24), self.backend == "NCCL"
        outgoing = {rank: x.contiguous() for rank, x in sent.items() if x.numel()}
        if nccl:  # which would have every rank send before any receives
            self._group._start_coalescing(self._device)
        works = [self._group.send([x], rank, tag) for rank, x in outgoing.items()]
        works += [self._group.recv([into], rank, tag) for rank, into in received.items() if into.numel()]
        if nccl:
            works = [self._group._end_coalescing(self._device)]
        self._sent += sum(x.nbytes for x in outgoing.values())

        def wait() -> None:
            for work in works:
                work.wait()
            outgoing.clear()  # which were to live so long

        return wait

    def abort(self) -> None:
        """Nothing waits for the others any more."""
        self._group.abort()


class RankGrid(RankGroup):
    """Context-parallel ranks each of which is several tensor-parallel ones. It is the group of those that have the same
    part of every layer, and other tokens; `tensor` those that have the same tokens.

    tensor_parallel 2, context_parallel 3:    0 1 | 2 3 | 4 5     groups of tokens: 0 2 4, 1 3 5
    """

    tensor: RankGroup

    def __init__(self, store: Path, rank: int, options: DeviceOptions, device: torch.device):
        place, part = divmod(rank, options.tensor_parallel)
        sizes = options.context_parallel, options.tensor_parallel
        super().__init__(store.with_name(f"{store.name}-context-{part}"), place, sizes[0], device, context=True)
        tensor = store.with_name(f"{store.name}-tensor-{place}")
        self.tensor = RankGroup(tensor, part, sizes[1], device, whole_experts=options.expert_parallel)
        self._every = RankGroup(store, rank, options.ranks, device)

    @property
    def sent(self) -> int:
        return self._sent + self.tensor.sent + self._every.sent

    def broadcast(self, x: torch.Tensor) -> None:
        self._every.broadcast(x)

    def abort(self) -> None:
        for group in (self._every, self.tensor):
            group.abort()
        super().abort()


def join_ranks(store: Path, rank: int, options: DeviceOptions, device: torch.device) -> RankGroup:
    """All ranks that there are, as one of them knows them. `store`: a file that they all name, and others beside it."""
    context = options.context_parallel > 1
    if context and options.tensor_parallel > 1:
        return RankGrid(store, rank, options, device)
    pipeline, whole = options.pipeline_parallel > 1, options.expert_parallel
    return RankGroup(store, rank, options.ranks, device, pipeline=pipeline, context=context, whole_experts=whole)
