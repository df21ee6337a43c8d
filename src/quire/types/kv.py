"""The KV layout as data: which layers share a page table, and what one page holds.

There is one pool of equal-byte pages. Layers are gathered into groups (full attention, a sliding window);
a page belongs to one group at a time and holds `tokens_per_page` tokens for *all* layers of that group, so a
page is contiguous and moves between tiers and machines in one copy:

    page p of group g:  [layer in g][K, V][token in page][kv head][head dim]        numbers
                        [layer in g][K, V][token in page][kv head][scales]          fp16, where the kind has some

Layers that keep no tokens but one state of fixed size (recurrent ones) make state groups. The states of all of them
lie together in a cell: one for each running sequence, and snapshots at page boundaries, which are what a prefix hit
starts from.

    cell c:  [layer][last inputs of its convolution][recurrent matrices]            float32
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

NULL_PAGE = 0  # never allocated: padding rows and windows that have moved on point here
NULL_STATE = 0  # never allocated and always zero: the state before the first token


class KVKind(msgspec.Struct, frozen=True):
    """How a page stores the numbers of one token and head."""

    bits: int  # of one number
    scaled: bool = False  # whether fp16 scales are stored beside them

    def scales(self, head_dim: int) -> int:
        """8 bits: one scale; 4 bits: a scale and a minimum for each 32 numbers, all scales first."""
        if not self.scaled:
            return 0
        return 1 if self.bits == 8 else 2 * blocks_of(head_dim)

    def head_bytes(self, head_dim: int) -> int:
        return -(-head_dim * self.bits // 8) + 2 * self.scales(head_dim)


def blocks_of(head_dim: int) -> int:
    """Parts of a head that 4-bit numbers are scaled by."""
    return head_dim // 32 if head_dim % 32 == 0 else 1


KINDS = {
    "float32": KVKind(32),
    "float16": KVKind(16),
    "bfloat16": KVKind(16),
    "float8_e4m3fn": KVKind(8),
    "int8": KVKind(8, scaled=True),
    "fp8": KVKind(8, scaled=True),
    "int4": KVKind(4, scaled=True),
}


class KVGroup(msgspec.Struct, frozen=True):
    layers: tuple[int, ...]
    tokens_per_page: int
    kv_heads: int
    head_dim: int
    window: int | None = None  # tokens a query sees, itself included; None: all of them
    values_from: int | None = None  # values are the keys from this dimension on (latent attention); None: their own

    @property
    def parts(self) -> int:
        """K and V, or keys that hold both."""
        return 2 if self.values_from is None else 1

    @property
    def token_heads(self) -> int:
        """Vectors of head_dim numbers that a token has."""
        return len(self.layers) * self.parts * self.kv_heads


class StateShape(msgspec.Struct, frozen=True):
    """What a recurrent layer keeps of a sequence, in float32."""

    window: tuple[int, int]  # last inputs of its convolution: taps less one, channels
    matrix: tuple[int, ...] = ()  # its recurrent state, if it has one beside them

    @property
    def numbers(self) -> int:
        return math.prod(self.window) + (math.prod(self.matrix) if self.matrix else 0)


class StateGroup(msgspec.Struct, frozen=True):
    """Layers whose memory of a sequence does not grow with it."""

    layers: tuple[int, ...]
    shape: StateShape


class KVLayout(msgspec.Struct, frozen=True):
    groups: tuple[KVGroup, ...]
    dtype: str  # a name in KINDS
    states: tuple[StateGroup, ...] = ()

    @property
    def kind(self) -> KVKind:
        return KINDS[self.dtype]

    @property
    def page_bytes(self) -> int:
        """The largest group's need; smaller groups leave a tail unused. Cells for states are made of pages too, and
        their numbers must lie straight."""
        size = max(g.tokens_per_page * self._token_bytes(g) for g in self.groups) or 16
        return -(-size // 16) * 16 if self.states else size

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all groups while it is inside every window."""
        return sum(self._token_bytes(g) for g in self.groups)

    def _token_bytes(self, group: KVGroup) -> int:
        return group.token_heads * self.kind.head_bytes(group.head_dim)

    @property
    def state_bytes(self) -> int:
        """Of one running sequence, however long; and of a snapshot."""
        return 4 * self.state_numbers

    @property
    def state_numbers(self) -> int:
        return sum(len(s.layers) * s.shape.numbers for s in self.states)

    @property
    def state_pages(self) -> int:
        """Pages that a cell takes: behind those of tokens, cell c has so many from c * state_pages on."""
        return -(-self.state_bytes // self.page_bytes) if self.states else 0

    @property
    def alignment(self) -> int:
        """Prefix hits end on multiples of this many tokens: a page boundary in every group."""
        return math.lcm(*(g.tokens_per_page for g in self.groups))

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens of one sequence need, ignoring what windows give back."""
        return sum(-(-tokens // g.tokens_per_page) for g in self.groups)


class TokenShape(msgspec.Struct, frozen=True):
    """What a layer keeps of a token, and for how long."""

    kv_heads: int
    head_dim: int
    window: int | None = None
    values_from: int | None = None

    def bytes(self, dtype: str) -> int:
        return (2 if self.values_from is None else 1) * self.kv_heads * KINDS[dtype].head_bytes(self.head_dim)


def layout_for(shapes: Sequence[TokenShape | StateShape | None], *, page_size: int, dtype: str) -> KVLayout:
    """Group layers by what they keep; the group whose tokens take most gets `page_size` tokens a page, the others as
    many times that as fit the same bytes."""
    by_shape: dict[TokenShape, list[int]] = {}
    by_state: dict[StateShape, list[int]] = {}
    for layer, shape in enumerate(shapes):
        if isinstance(shape, StateShape):
            by_state.setdefault(shape, []).append(layer)
        elif shape is not None:  # else it attends what another layer keeps
            by_shape.setdefault(shape, []).append(layer)
    if not by_shape and not by_state:  # an encoder: pages count tokens, and hold nothing
        return KVLayout((KVGroup((), page_size, kv_heads=1, head_dim=1),), dtype)
    sizes = {shape: len(layers) * shape.bytes(dtype) for shape, layers in by_shape.items()}
    groups = tuple(
        KVGroup(
            layers=tuple(layers),
            tokens_per_page=page_size * (max(sizes.values()) // sizes[shape]),
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            window=shape.window,
            values_from=shape.values_from,
        )
        for shape, layers in by_shape.items()
    )
    states = tuple(StateGroup(tuple(layers), state) for state, layers in by_state.items())
    return KVLayout(groups=groups, dtype=dtype, states=states)
