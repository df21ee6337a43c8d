"""Which replicas hold which prefixes: names of blocks, each with the set of replicas that have it cached.

    block name ──► replicas, as bits of an integer

Fed by what is routed (a replica will have computed it), by replicas' own cache events, and corrected by what requests
found when they got there. Names are chained, so a replica that holds a block holds, or held, all before it. What a
replica can hold at most bounds what is remembered of it. Refuses to know: how blocks are named, loads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import count
from typing import NamedTuple

DEFAULT_CAPACITY = 1 << 18  # blocks of a replica that does not say how many it holds
MAX_TOLD_RUN = 32  # blocks that a replica told of together and that count as one run: they may be of several prompts


class PrefixMatch(NamedTuple):
    """Replicas, as bits, that hold at least the first `blocks` of a prompt."""

    blocks: int
    replicas: int


class PrefixDirectory:
    """Of each replica it remembers what was used last, by runs: blocks that follow each other in a prompt and have been
    used together ever since. So a prompt that comes again renews a few runs, however many blocks these have."""

    def __init__(self, replicas: int, capacity: int = DEFAULT_CAPACITY):
        """`capacity`: blocks that one replica holds."""
        self._where: dict[Hashable, int] = {}
        self._held: list[dict[Hashable, int]] = [{} for _ in range(replicas)]  # blocks, and the run that each is in
        # By number, what was used longest ago first.
        self._runs: list[OrderedDict[int, list[Hashable]]] = [OrderedDict() for _ in range(replicas)]
        self._capacity = [capacity] * replicas
        self._bits = [1 << replica for replica in range(replicas)]  # one object each, for all that only one holds
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._where)

    def holds(self, replica: int) -> int:
        """Blocks that are known of a replica."""
        return len(self._held[replica])

    def resize(self, replica: int, capacity: int) -> None:
        self._capacity[replica] = capacity

    def match(self, blocks: Sequence[Hashable]) -> list[PrefixMatch]:
        """Who holds how much of a prompt, the longest prefix first; who holds nothing is not listed. The longest is
        exact, shorter ones are found by quarters of it."""
        where, low, high, seen = self._where.get, 0, len(blocks), 0
        while low < high:  # the last that anyone holds: who holds it holds those before it
            middle = (low + high + 1) // 2
            if holders := where(blocks[middle - 1], 0):
                low, seen = middle, holders
            else:
                high = middle - 1
        found = [PrefixMatch(low, seen)] if low else []
        for matched in (low * 3 // 4, low // 2, low // 4) if low > 3 else range(low - 1, 0, -1):
            if replicas := where(blocks[matched - 1], 0) & ~seen:
                found.append(PrefixMatch(matched, replicas))
                seen |= replicas
        return found

    def use(self, replica: int, blocks: Sequence[Hashable]) -> None:
        """A prompt goes there: all its blocks are there or will be, and used last. Its end leaves before its beginning,
        as in the replica's own cache; what of a prefix is left is then known from its first block on."""
        held, runs = self._held[replica], self._runs[replica]
        end = len(blocks)
        while end:
            start = end
            while start and blocks[start - 1] not in held:
                start -= 1
            if start < end:
                self._append(replica, blocks[start:end])
            else:
                number = held[blocks[end - 1]]
                if runs[number][-1] == blocks[end - 1]:
                    runs.move_to_end(number)
                else:  # what follows there is not of this prompt, and stays behind
                    number = self._split(replica, number, runs[number].index(blocks[end - 1]) + 1)
                start = end - len(runs[number])
                if start < 0 or runs[number][0] != blocks[start]:  # others' blocks are in it, as far as is looked at
                    start = end - 1
            end = start
        self._evict(replica)

    def add(self, replica: int, blocks: Sequence[Hashable]) -> None:
        """The replica has these blocks, of one prompt or of several."""
        held = self._held[replica]
        unknown = list(dict.fromkeys(block for block in blocks if block not in held))
        for start in range(0, len(unknown), MAX_TOLD_RUN):
            self._append(replica, unknown[start : start + MAX_TOLD_RUN])
        self._evict(replica)

    def _append(self, replica: int, run: Sequence[Hashable]) -> None:
        number, where, bit = next(self._numbers), self._where, self._bits[replica]
        numbered = dict.fromkeys(run, number)  # none is named twice
        self._runs[replica][number] = list(numbered)
        self._held[replica].update(numbered)
        for block in numbered:
            where[block] = where[block] | bit if block in where else bit

    def _split(self, replica: int, number: int, at: int) -> int:
        """The number of the run, used last, that its first blocks now are by themselves."""
        runs, head = self._runs[replica], next(self._numbers)
        runs[head] = runs[number][:at]
        del runs[number][:at]
        self._held[replica].update(dict.fromkeys(runs[head], head))
        return head

    def _evict(self, replica: int) -> None:
        """What was not used for longest, down to what the replica can hold."""
        held, runs = self._held[replica], self._runs[replica]
        while (over := len(held) - self._capacity[replica]) > 0:
            number, run = runs.popitem(last=False)
            self._clear(replica, run[-over:])
            if left := run[:-over]:
                runs[number] = left
                runs.move_to_end(number, last=False)

    def _clear(self, replica: int, blocks: Iterable[Hashable]) -> None:
        held, where, bit = self._held[replica], self._where, self._bits[replica]
        for block in blocks:
            del held[block]
            if (holders := where.pop(block)) is not bit and holders != bit:
                where[block] = holders ^ bit

    def remove(self, replica: int, blocks: Iterable[Hashable]) -> None:
        held, runs = self._held[replica], self._runs[replica]
        for block in blocks:
            if (number := held.get(block)) is not None:
                run = runs[number]
                del run[-1 if run[-1] == block else run.index(block)]
                if not run:
                    del runs[number]
                self._clear(replica, [block])

    def forget(self, replica: int) -> None:
        """The replica is gone, or its cache is."""
        self._clear(replica, list(self._held[replica]))
        self._runs[replica].clear()

    def check(self) -> None:
        """All sides say the same."""
        for replica, (held, runs) in enumerate(zip(self._held, self._runs, strict=True)):
            assert all(self._where[block] >> replica & 1 for block in held), "a block is held and not listed"
            assert held == {block: number for number, run in runs.items() for block in run}, "runs hold something else"
            assert all(runs.values()), "an empty run"
            assert sum(map(len, runs.values())) == len(held), "a block is in two runs"
        assert sum(mask.bit_count() for mask in self._where.values()) == sum(map(len, self._held))
