"""A rank of a parallel engine, other than rank 0, in a process of its own:
`python -m quire.runtime.executors.rank_process FD PARENT-PID DIRECTORY RANK OPTIONS-JSON`.

It has its part of the weights and of the KV pages, follows the plans that rank 0 sends in the order it sends them, and
meets the others in the collectives of the forward pass. It ends when told to, or when rank 0 is gone. Refuses to know:
requests, how tokens are sampled.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace

from quire.assets import resolve as find_model
from quire.generation.drafting.speculation import ExpandedPlan
from quire.runtime.capacity import capacity_for, kv_layout
from quire.runtime.executors.rank_group import RankGroup, join_ranks
from quire.runtime.executors.rank_messages import (
    EndRank,
    Forward,
    FromRank,
    KeepBranch,
    KeepState,
    RankFailed,
    RankJoined,
    RankReady,
    RankStarted,
    StartRank,
    StoreSamples,
    ToRank,
)
from quire.runtime.hardware import probe, resolve
from quire.runtime.load_runnable import load_runnable
from quire.runtime.worker import ForwardWorker
from quire.types.config import EngineOptions
from quire.types.logs import configure_child
from quire.types.parent_watch import end_with_parent

log = logging.getLogger(__name__)


class RankProcess:
    def __init__(self, link: Connection):
        self._link = link
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToRank)

    def send(self, message: FromRank) -> None:
        self._link.send_bytes(self._encoder.encode(message))

    def receive(self) -> ToRank:
        return self._decoder.decode(self._link.recv_bytes())

    def run(self, directory: Path, rank: int, options: EngineOptions) -> None:
        self.send(RankJoined())
        hardware = probe(options.device.device)
        resolved = resolve(options, hardware)
        device = torch.device(resolved.device)
        group = join_ranks(directory / "store", rank, options.device, device)
        source = find_model(options.model.model).open()
        model = load_runnable(options, hardware, resolved, source, ranks=group)
        layout = kv_layout(options, resolved, model.spec, model.kv_dtype, model.kv_kinds)
        self.send(RankReady(capacity_for(options, resolved, layout, model, None)[0].pages, layout.page_bytes))
        start = self.receive()
        if not isinstance(start, StartRank):
            return
        worker = ForwardWorker(model, layout, start.capacity, device, ranks=group)
        self.send(RankStarted())
        if device.type == "cuda":
            worker.warm_up()
        with torch.inference_mode():
            while not isinstance(message := self.receive(), EndRank):
                follow(message, worker, group)


def follow(message: ToRank, worker: ForwardWorker, group: RankGroup) -> None:
    """What rank 0 does to its own worker, done to this one."""
    match message:
        case Forward(plan, tree_rows):
            if group.heads_apart:  # others have the head, and the layers that are probed
                plan = replace(plan, samples=[], probes=[])
            output = worker.forward(ExpandedPlan(plan, [], tree_rows), draws=False)
            for _ in () if group.heads_apart else output.prompt_logits:  # computed as they are read, by all ranks
                pass
        case StoreSamples(slots, positions):
            sampled = torch.empty(len(slots), dtype=torch.int64, device=worker.device)
            group.broadcast(sampled)
            worker.store(slots, positions, sampled)
        case KeepBranch(slot, position, tokens, indices):
            worker.keep_branch(slot, position, tokens, indices)
        case KeepState(slot, accepted):
            worker.keep_state(slot, accepted)


def main(descriptor: str, parent: str, directory: str, rank: str, options: str) -> int:
    configure_child(f"rank {rank}")
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides when to stop
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(int(parent))
    process = RankProcess(Connection(int(descriptor)))
    try:
        process.run(Path(directory), int(rank), EngineOptions.of(**json.loads(options)))
        return 0
    except EOFError:  # rank 0 is gone
        return 1
    except Exception as error:
        with suppress(OSError):
            process.send(RankFailed(f"{type(error).__name__}: {error}"))
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
