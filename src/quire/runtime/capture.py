"""Steps captured once and replayed: fixed sizes, so that a GPU runs the whole forward pass from one launch.

A captured step is keyed by (tokens, rows). A real step takes the smallest that holds it and pads itself: spare
rows belong to the null slot, and the first of them takes all spare tokens. What varies between replays is only
the small integer table of rows, copied in before.

    rows table [7, rows]:   slot | start | count | shift | slot that a token is drawn for (the null slot: none) |
                            cells that recurrent layers read and write, where there are such

Steps whose rows share prefixes are captured too, in a few sizes, with the groups that share one as a second table.
An engine is ready with those that its first requests need; the others follow while it has nothing to do, or as they are
met.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_low
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire.kernels.triton import why_not
from quire.kernels.triton.launch import compile_together, power_of_two
from quire.runtime.prefix_groups import BLOCK_HEADS, Lists, SharedPrefixes
from quire.runtime.staging import Ints, Staging
from quire.types.plan import captured_size

if TYPE_CHECKING:
    from quire.kernels.triton.paged_attention import PrefixLists

PREFIX_ROWS = (32, 64, 128, 256, 512, 1024)  # sizes captured for rows that share prefixes
# Steps with rows of several tokens are captured up to here: a host takes 17 ms to launch one by one what a GPU computes
# in 14 at 400 tokens, in 34 at 1,300.
MIXED_TOKENS = (64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536)
MIXED_ROWS = (8, 32, 64, 128, 256, 384, 512)  # at most so many rows in them
FIRST_ROWS = 8  # steps of so few rows are captured before the first request
REPLAYS = 5  # of two steps that are compared
MAX_STEP_RATIO = 0.998  # of the time of the step before, of one that takes its place
Key = tuple[int, int, bool]  # tokens, rows, whether rows share prefixes


@dataclass
class StepOutput:
    logits: torch.Tensor  # [rows, vocabulary], of each row's last token
    drawn: torch.Tensor  # [rows], a token each, as the parameters of the slots say that receive them
    hidden: torch.Tensor  # [rows, hidden or more], of each row's last token, as the tap has it


# rows table, tokens, counts, kv_lens, shared prefixes
Forward = Callable[[torch.Tensor, int, list[int], list[int], "PrefixLists | None"], StepOutput]
Warmup = Callable[[torch.Tensor, int, list[int], list[int], "PrefixLists | None"], object]


@dataclass
class _Inputs:
    """What is written before a replay."""

    rows: torch.Tensor  # [7, rows]
    shared: torch.Tensor | None = None  # the lists of shared prefixes, as int64
    lists: PrefixLists | None = None  # ... as the kernels read them


@dataclass
class _Capture:
    inputs: _Inputs
    output: StepOutput
    replay: Callable[[], Any]


def row_buckets(most: int) -> list[int]:
    """1, 2, 4, 8, then by 8 to 64, by 16 to 256, by 64 beyond: at most a few per cent of padding."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 1, 64)]
    return sorted({*(s for s in sizes if s < most), most})


class CapturedSteps:
    def __init__(
        self,
        forward: Forward,
        *,
        max_rows: int,
        max_kv: int,
        max_tokens: int,
        null_slot: int,
        device: torch.device,
        warmups: Sequence[Warmup],
        sharing: SharedPrefixes | None = None,
        waste_cell: int | None = None,
    ):
        """`warmups` launch what `forward` does in less time: the last all of it, those before it what takes long
        to compile. `waste_cell`, of models with recurrent layers: where padding leaves its states; of those, steps are
        captured whose rows have one token each."""
        self._forward = forward
        self._warmups = warmups
        self._sharing = sharing
        self._null_slot = null_slot
        self._device = device
        self._max_kv = max_kv
        self._row_sizes = row_buckets(max_rows)
        self._waste_cell = waste_cell or 0
        largest = max_tokens if waste_cell is None else 0
        self.mixed_sizes = [(t, rows) for t in MIXED_TOKENS if t <= largest for rows in self._mixed_rows(t)]
        self._captures: dict[Key, _Capture] = {}
        self._outdated: set[Key] = set()
        self.pool: Any = None  # of the memory that all of them work in

    @property
    def ready(self) -> bool:
        return bool(self._captures)

    def capture(
        self, *, beside: Sequence[Callable[[], None]], within: CapturedSteps | None = None, whole: bool = True
    ) -> None:
        """Record all sizes, largest first, so that the smaller ones fit into memory already taken; if not `whole`, the
        largest of each kind and those that the first requests need. `beside`: what is launched and not captured.
        `within`: steps whose memory these take too; never are two of them replayed at a time."""
        if not self.ready and why_not(self._device) is None:
            self._compile(beside)
        self.pool = torch.cuda.graph_pool_handle() if within is None else within.pool
        self._captures.clear()
        self._outdated.clear()
        keys = self._keys()
        largest = {(tokens == rows, shared): (tokens, rows, shared) for tokens, rows, shared in reversed(keys)}.values()
        for key in keys:
            if whole or key in largest or key[1] <= FIRST_ROWS:
                self._captures[key] = self._record(*key)
        torch.cuda.synchronize()

    def capture_next(self) -> bool:
        """Record the smallest of those that were left for later, or are outdated; whether there are more."""
        left = [key for key in self._keys() if key not in self._captures or key in self._outdated]
        if left:
            self._captures[min(left)] = self._record(*min(left))
            self._outdated.discard(min(left))
        return len(left) > 1

    def renew(self, sizes: Collection[int]) -> None:
        """Have steps of so many tokens or rows recorded again: other kernels were chosen for them."""
        self._outdated |= {key for key in self._captures if not {*key[:2]}.isdisjoint(sizes)}

    def try_again(self, size: int) -> bool:
        """Record a step of so many tokens anew, with kernels that were chosen since, and keep it if it is the faster
        one."""
        key = max((key for key in self._keys() if key[0] == size and not key[2]), default=None)
        if key is None:
            return False
        old, new = self._capture_of(key), self._record(*key)
        old.inputs.rows.copy_(new.inputs.rows)  # it has rows of requests, whose slots others may have by now
        before, after = replay_ms([old.replay, new.replay])
        if faster := after < MAX_STEP_RATIO * before:
            self._captures[key] = new
        return faster

    def _keys(self) -> list[Key]:
        """Of all captures, those without shared prefixes first, the largest first."""
        plain = sorted(((tokens, rows, False) for tokens, rows in self.sizes()), reverse=True)
        return [*plain, *((rows, rows, True) for rows in sorted(self._shared_sizes(), reverse=True))]

    def _capture_of(self, key: Key) -> _Capture:
        if (found := self._captures.get(key)) is None:
            found = self._captures[key] = self._record(*key)
        return found

    def _compile(self, beside: Sequence[Callable[[], None]]) -> None:
        """A step of each kind, in threads: the first start on a machine is mostly compiling kernels, and that goes on
        side by side so. One stream has all their launches, and its order keeps shared buffers whole."""

        def run(job: Callable[[], Any]) -> None:
            with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(stream):
                job()

        stream = torch.cuda.current_stream(self._device)
        tables = [(*size, self._null_inputs(*size)) for size in self._compile_sizes()]
        tables += [(n, n, self._null_inputs(n, n, shared=True)) for n in self._shared_sizes()]
        jobs: list[Callable[[], Any]] = [partial(self._step, part, *t) for part in self._warmups for t in tables]
        compile_together([partial(run, job) for job in [*jobs, *beside]], self._device)
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # each thread had its own
        torch.cuda.empty_cache()

    def sizes(self) -> list[tuple[int, int]]:
        """(tokens, rows) of all captures; equal numbers mean that every row has one token."""
        return [(rows, rows) for rows in self._row_sizes] + self.mixed_sizes

    def _compile_sizes(self) -> list[tuple[int, int]]:
        """Sizes that together launch all kernels that any does."""
        sizes = [size for size in self.sizes() if size[0] <= 512]
        return list({(t == rows, t if t < 64 else power_of_two(t)): (t, rows) for t, rows in sizes}.values())

    def _mixed_rows(self, tokens: int) -> list[int]:
        most = self._row_sizes[-1] + 1
        return sorted({min(rows, most) for rows in (*MIXED_ROWS, most) if tokens // 64 <= rows < tokens})

    def fit(self, counts: list[int]) -> tuple[int, int] | None:
        """The capture a step of these rows goes into, if any."""
        rows, tokens = len(counts), sum(counts)
        if tokens == rows:
            at = bisect_left(self._row_sizes, rows)
            return (self._row_sizes[at],) * 2 if at < len(self._row_sizes) else None
        return captured_size(self.mixed_sizes, tokens, rows)

    def replay(self, size: tuple[int, int], table: Ints, staging: Staging) -> StepOutput:
        """Run the capture of `size` on a table [7, rows]; the output is overwritten by the next replay."""
        return self._run(self._capture_of((*size, False)), table, size, staging)

    def prefix_rows(self, rows: int) -> int | None:
        """The size at which single-token rows that share prefixes are captured."""
        return next((size for size in PREFIX_ROWS if rows <= size <= self._row_sizes[-1]), None)

    def replay_shared(self, rows: int, table: Ints, lists: Lists, staging: Staging) -> StepOutput:
        """As `replay`, for `rows` single-token rows that share prefixes as `lists` says."""
        capture = self._capture_of((rows, rows, True))
        assert capture.inputs.shared is not None
        capture.inputs.shared.copy_(staging.stage(lists.view(np.int64)), non_blocking=True)
        return self._run(capture, table, (rows, rows), staging)

    def _run(self, capture: _Capture, table: Ints, size: tuple[int, int], staging: Staging) -> StepOutput:
        capture.inputs.rows.copy_(
            staging.stage(pad_table(table, size, self._null_slot, self._waste_cell)), non_blocking=True
        )
        capture.replay()
        return capture.output

    def _shared_sizes(self) -> list[int]:
        return [size for size in PREFIX_ROWS if size <= self._row_sizes[-1]] if self._sharing is not None else []

    def _null_inputs(self, tokens: int, rows: int, *, shared: bool = False) -> _Inputs:
        """Tables of a step whose rows are all in the null slot; `shared`: with groups that share prefixes."""
        table = pad_table(np.zeros((7, 0), np.int64), (tokens, rows), self._null_slot, self._waste_cell)
        inputs = _Inputs(torch.from_numpy(table).to(self._device))
        if shared:
            assert self._sharing is not None
            flat = torch.zeros(self._sharing.length(rows), dtype=torch.int32, device=self._device)
            inputs.shared = flat.view(torch.int64)
            inputs.lists = _prefix_views(flat, self._sharing.items(rows), rows, self._max_kv)
            inputs.lists.items.fill_(-1)
        return inputs

    def _step(self, forward: Warmup, tokens: int, rows: int, inputs: _Inputs) -> Any:
        return forward(inputs.rows, tokens, *bounds(tokens, rows, self._max_kv), inputs.lists)

    def _record(self, tokens: int, rows: int, shared: bool) -> _Capture:
        inputs = self._null_inputs(tokens, rows, shared=shared)
        self._step(self._warmups[-1], tokens, rows, inputs)  # compiles kernels, sizes workspaces outside the capture
        graph = torch.cuda.CUDAGraph()
        # Only this thread may not wait for the device meanwhile: others move pages
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            output: StepOutput = self._step(self._forward, tokens, rows, inputs)
        output = StepOutput(*(_borrowed(tensor) for tensor in (output.logits, output.drawn, output.hidden)))
        return _Capture(inputs, output, graph.replay)


def replay_ms(replays: Sequence[Callable[[], Any]]) -> list[float]:
    """Milliseconds that each takes on the device, in turn."""
    times: list[list[float]] = [[] for _ in replays]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(REPLAYS):
        for replay, found in zip(replays, times, strict=True):
            begin.record()
            replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end))
    return [median_low(found) for found in times]


class _BorrowedMemory:
    """A tensor's memory as libraries hand arrays to each other, without keeping it."""

    def __init__(self, tensor: torch.Tensor):
        kind = f"<i{tensor.element_size()}"  # whatever it is: not all kinds of numbers have a name there
        self.__cuda_array_interface__ = {
            "version": 3, "shape": tuple(tensor.shape), "typestr": kind, "data": (tensor.data_ptr(), False)
        }  # fmt: skip


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, free for the next capture to use: only the latest replay's output is ever read."""
    assert tensor.is_contiguous()
    return torch.as_tensor(_BorrowedMemory(tensor), device=tensor.device).view(tensor.dtype)


def _prefix_views(flat: torch.Tensor, items: int, rows: int, longest: int) -> PrefixLists:
    from quire.kernels.triton.paged_attention import PrefixLists

    at = 4 * items
    return PrefixLists(
        items=flat[:at].view(items, 4),
        members=flat[at : at + 2 * rows].view(rows, 2),
        row_begin=flat[at + 2 * rows : at + 3 * rows],
        block_m=BLOCK_HEADS,
        longest=longest,
    )


def bounds(tokens: int, rows: int, max_kv: int) -> tuple[list[int], list[int]]:
    """Counts and KV lengths that hold for every step of this size (no row looks as if it had no context). One row may
    have all tokens: spare rows have none."""
    counts = [1] * rows if tokens == rows else [tokens, *[1] * (rows - 1)]
    return counts, [max(max_kv, tokens + 1)] * rows


def pad_table(table: Ints, size: tuple[int, int], null_slot: int, waste_cell: int = 0) -> Ints:
    """A table of `size`: spare rows are in the null slot, the first of them holds all spare tokens."""
    tokens, rows = size
    padded = np.zeros((7, rows), dtype=np.int64)
    used = table.shape[1]
    padded[:, :used] = table
    padded[0, used:] = padded[4, used:] = null_slot
    padded[6, used:] = waste_cell
    spare = tokens - int(table[2].sum())
    if tokens == rows:
        padded[2, used:] = 1
    elif spare:
        padded[2, used] = spare
    return padded
