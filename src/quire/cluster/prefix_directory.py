"""Which replicas hold which prefixes: names of blocks, each with the set of replicas that have it cached.

    block name ──► replicas, as bits of an integer

Fed by what is routed (a replica will have computed it), by replicas' own cache events, and corrected by what requests
found when they got there. Names are chained, so a replica that holds a block holds, or held, all before it. What a
replica can hold at most bounds what is remembered of it. Refuses to know: how blocks are named, loads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

DEFAULT_CAPACITY = 1 << 18  # blocks of a replica that does not say how many it holds


class PrefixMatch(NamedTuple):
    """Replicas, as bits, that hold at least the first `blocks` of a prompt."""

    blocks: int
    replicas: int


class PrefixDirectory:
    def __init__(self, replicas: int, capacity: int = DEFAULT_CAPACITY):
        """`capacity`: blocks that one replica holds."""
        self._where: dict[Hashable, int] = {}
        self._held: list[OrderedDict[Hashable, None]] = [OrderedDict() for _ in range(replicas)]
        self._capacity = [capacity] * replicas

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
        self.add(replica, reversed(blocks))

    def add(self, replica: int, blocks: Iterable[Hashable]) -> None:
        """The replica has these blocks, or will have computed them when anyone else asks for them."""
        held, where, bit = self._held[replica], self._where, 1 << replica
        renew, holders, oldest = held.move_to_end, where.get, held.popitem
        for block in blocks:
            if block in held:
                renew(block)
            else:
                held[block] = None
                where[block] = holders(block, 0) | bit
        for _ in range(len(held) - self._capacity[replica]):
            block, _ = oldest(last=False)
            if left := where[block] ^ bit:
                where[block] = left
            else:
                del where[block]

    def remove(self, replica: int, blocks: Iterable[Hashable]) -> None:
        held, bit = self._held[replica], 1 << replica
        for block in blocks:
            if block in held:
                del held[block]
                self._clear(block, bit)

    def forget(self, replica: int) -> None:
        """The replica is gone, or its cache is."""
        self.remove(replica, list(self._held[replica]))

    def _clear(self, block: Hashable, bit: int) -> None:
        holders = self._where[block]
        if holders == bit:
            del self._where[block]
        else:
            self._where[block] = holders & ~bit

    def check(self) -> None:
        """Both sides say the same."""
        for replica, held in enumerate(self._held):
            assert all(self._where[block] >> replica & 1 for block in held), "a block is held and not listed"
        assert sum(mask.bit_count() for mask in self._where.values()) == sum(map(len, self._held))
