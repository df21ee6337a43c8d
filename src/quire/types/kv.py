"""The KV layout as data: which layers share a page table, and what one page holds.

There is one pool of equal-byte pages. Layers are gathered into groups (full attention, a sliding window);
a page belongs to one group at a time and holds `tokens_per_page` tokens for *all* layers of that group, so a
page is contiguous and moves between tiers and machines in one copy:

    page p of group g:  [layer in g][K, V][token in page][kv head][head dim]        numbers
                        [layer in g][K, V][token in page][kv head][scales]          fp16, where the kind has some

Kinds with a residual (KIVI: Liu et al. 2024) round keys over RESIDUAL_GROUP tokens, channel by channel, and read the
latest RESIDUAL tokens unrounded. Each of their groups is two: one of rounded tokens, in whose pages the scales of K are
[group of tokens][kv head][scale, minimum][head dim]; and one with the window of the latest, in the model's own kind.
Tokens are rounded by the step that computes the last of a group of them, from what the window has, so that a full page
is what its tokens say. The query at position p reads what is before `residual_start(p)` rounded, the rest as it was.

Layers that keep no tokens but one state of fixed size (recurrent ones) make state groups. The states of all of them
lie together in a cell: one for each running sequence, and snapshots at page boundaries, which are what a prefix hit
starts from.

    cell c:  [layer][last inputs of its convolution][recurrent matrices]            float32
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

NULL_PAGE = 0  # never allocated: padding rows and windows that have moved on point here
LAYER_PARTS = 4  # that a page is handed over in, at most
NULL_STATE = 0  # never allocated and always zero: the state before the first token


class KVKind(msgspec.Struct, frozen=True):
    """How a page stores the numbers of one token and head."""

    bits: int  # of one number
    scaled: bool = False  # whether fp16 scales are stored beside them
    residual: bool = False  # whether the latest tokens are read unrounded, and keys are scaled by channel

    def scales(self, head_dim: int) -> int:
        """8 bits: one scale; fewer: a scale and a minimum for each 32 numbers, all scales first."""
        if not self.scaled:
            return 0
        return 1 if self.bits == 8 else 2 * blocks_of(head_dim)

    def head_bytes(self, head_dim: int) -> int:
        return -(-head_dim * self.bits // 8) + 2 * self.scales(head_dim)


def blocks_of(head_dim: int) -> int:
    """Parts of a head that numbers of 4 bits and less are scaled by."""
    return head_dim // 32 if head_dim % 32 == 0 else 1


RESIDUAL = 128  # tokens before a query that it reads unrounded, at least (KIVI's R)
RESIDUAL_GROUP = 32  # tokens whose keys share a scale for each channel (KIVI's G); a page has whole groups


def residual_start(position: int) -> int:
    """The first token that the query at this position reads unrounded: by position alone, so that nothing depends on
    how a prompt is cut into steps."""
    return max(0, position - RESIDUAL) // RESIDUAL_GROUP * RESIDUAL_GROUP


KINDS = {
    "float32": KVKind(32),
    "float16": KVKind(16),
    "bfloat16": KVKind(16),
    "float8_e4m3fn": KVKind(8),
    "int8": KVKind(8, scaled=True),
    "fp8": KVKind(8, scaled=True),
    "int4": KVKind(4, scaled=True),
    "kivi4": KVKind(4, scaled=True, residual=True),
    "kivi2": KVKind(2, scaled=True, residual=True),
}


class KVGroup(msgspec.Struct, frozen=True):
    layers: tuple[int, ...]
    tokens_per_page: int
    kv_heads: int
    head_dim: int
    window: int | None = None  # tokens a query sees, itself included; None: all of them
    values_from: int | None = None  # values are the keys from this dimension on (latent attention); None: their own
    dtype: str = ""  # a name in KINDS, where it is not the layout's
    residual: int | None = None  # the group that has the latest tokens of these layers unrounded

    @property
    def parts(self) -> int:
        """K and V, or keys that hold both."""
        return 2 if self.values_from is None else 1

    @property
    def token_heads(self) -> int:
        """Vectors of head_dim numbers that a token has."""
        return len(self.layers) * self.parts * self.kv_heads


class LayerPart(msgspec.Struct, frozen=True):
    """Some layers of a page: bytes `start` to `end`, which are final when `layer` is written."""

    layer: int
    start: int
    end: int


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
    step_tokens: int = 0  # most tokens of a sequence that a step computes; 0: any number
    ranks: int = 1  # context-parallel ones: each keeps every so many-th token of a page

    @property
    def own(self) -> KVLayout:
        """What one of the ranks keeps."""
        groups = (replace(g, tokens_per_page=g.tokens_per_page // self.ranks) for g in self.groups)
        return replace(self, groups=tuple(groups), ranks=1)

    def kind_of(self, group: KVGroup) -> KVKind:
        return KINDS[group.dtype or self.dtype]

    @property
    def page_bytes(self) -> int:
        """The largest group's need, on one rank; smaller groups leave a tail unused. Cells for states are made of pages
        too, and their numbers must lie straight."""
        size = max(g.tokens_per_page // self.ranks * self._token_bytes(g) for g in self.groups) or 16
        return -(-size // 16) * 16 if self.states else size

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all groups while it is inside every window."""
        return sum(self._token_bytes(g) for g in self.groups)

    @property
    def lasting_bytes(self) -> int:
        """KV bytes of one token once it has left every window."""
        return sum(self._token_bytes(g) for g in self.groups if g.window is None)

    def _token_bytes(self, group: KVGroup) -> int:
        return group.token_heads * self.kind_of(group).head_bytes(group.head_dim)

    def layer_parts(self, group: int) -> list[LayerPart]:
        """A page of the group in runs of layers, for who sends it as they are written. Scales lie behind all layers'
        numbers, and go with the last."""
        spec = self.groups[group]
        count = min(LAYER_PARTS, len(spec.layers))
        size = spec.tokens_per_page * spec.parts * spec.kv_heads * spec.head_dim * self.kind_of(spec).bits // 8
        ends = [len(spec.layers) * (i + 1) // count for i in range(count)]
        starts = [0, *ends[:-1]]
        bounds = [*(end * size for end in ends[:-1]), self.page_bytes]
        return [
            LayerPart(spec.layers[end - 1], start * size, bound)
            for start, end, bound in zip(starts, ends, bounds, strict=True)
        ]

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
        """Pages that a sequence of `tokens` tokens needs at most at a time: of a window, those in sight of a step."""
        return sum(-(-min(tokens, self._in_sight(g)) // g.tokens_per_page) for g in self.groups)

    def _in_sight(self, group: KVGroup) -> int:
        """Tokens, from the beginning of a page on, that the longest step of a sequence reads and writes."""
        if group.window is None or not self.step_tokens:
            return sys.maxsize
        return group.window - 1 + self.step_tokens + group.tokens_per_page - 1

    def tokens_in(self, pages: int) -> int:
        """The longest sequence that so many pages hold."""
        most = pages * max(g.tokens_per_page for g in self.groups)
        return bisect_right(range(most + 1), pages, key=self.pages_for) - 1


class TokenShape(msgspec.Struct, frozen=True):
    """What a layer keeps of a token, and for how long."""

    kv_heads: int
    head_dim: int
    window: int | None = None
    values_from: int | None = None

    def bytes(self, dtype: str) -> int:
        return (2 if self.values_from is None else 1) * self.kv_heads * KINDS[dtype].head_bytes(self.head_dim)


def layout_for(
    shapes: Sequence[TokenShape | StateShape | None], *, page_size: int, dtype: str, own: str = ""
) -> KVLayout:
    """Group layers by what they keep; the group whose tokens take most gets `page_size` tokens a page, the others as
    many times that as fit the same bytes. With a residual, that is counted in the latest tokens' kind, `own`, and pages
    of rounded tokens take the next whole number of groups; layers that have a window keep it in that kind."""
    by_shape: dict[TokenShape, list[int]] = {}
    by_state: dict[StateShape, list[int]] = {}
    for layer, shape in enumerate(shapes):
        if isinstance(shape, StateShape):
            by_state.setdefault(shape, []).append(layer)
        elif shape is not None:  # else it attends what another layer keeps
            by_shape.setdefault(shape, []).append(layer)
    if not by_shape and not by_state:  # an encoder: pages count tokens, and hold nothing
        return KVLayout((KVGroup((), page_size, kv_heads=1, head_dim=1),), dtype)
    plain = own if KINDS[dtype].residual else dtype
    sizes = {shape: len(layers) * shape.bytes(plain) for shape, layers in by_shape.items()}
    largest = max(sizes.values(), default=0)
    groups = [_group(shape, layers, page_size * (largest // sizes[shape])) for shape, layers in by_shape.items()]
    states = tuple(StateGroup(tuple(layers), state) for state, layers in by_state.items())
    if KINDS[dtype].residual:
        groups = _with_residuals(groups, page_size * largest, dtype, own)
    return KVLayout(groups=tuple(groups), dtype=dtype, states=states)


def _group(shape: TokenShape, layers: Sequence[int], tokens: int) -> KVGroup:
    return KVGroup(
        layers=tuple(layers),
        tokens_per_page=tokens,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        window=shape.window,
        values_from=shape.values_from,
    )


def _with_residuals(groups: list[KVGroup], page_bytes: int, dtype: str, own: str) -> list[KVGroup]:
    """Groups of rounded tokens first; behind them, of each, the latest tokens as they were."""
    whole = [group for group in groups if group.window is None]
    rounded = []
    for index, group in enumerate(whole):
        run = RESIDUAL_GROUP * group.token_heads * KINDS[dtype].head_bytes(group.head_dim)
        tokens = RESIDUAL_GROUP * -(-page_bytes // run)
        rounded.append(replace(group, tokens_per_page=tokens, residual=len(whole) + index))
    latest = [replace(group, window=RESIDUAL + RESIDUAL_GROUP, dtype=own) for group in whole]
    return [*rounded, *latest, *(replace(group, dtype=own) for group in groups if group.window is not None)]
