"""What a decoder is, as data: a list of layers, each a mixer, a feed-forward part and norms around them.

A mixer moves information between tokens (attention over pages, or a recurrent state); a feed works on each token
alone. Another kind of either is one more dataclass here, a block for it in `blocks/` and a stage that runs it.
Everything else in this package is derived from these facts. Refuses to know: torch, where the facts came from, how they
are computed with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from quire.model.recurrent_spec import GatedDelta, Mamba2, ShortConv
from quire.types.kv import KINDS, KVLayout, TokenShape, layout_for

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"]
GatedActivation = Activation | Literal["swiglu_oai"]  # gpt-oss: clamped, and one is added to up

DENSE_LAYERS = 2  # at the bottom: Quest leaves them dense


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions: `dim` leading dimensions of each head are rotated."""

    theta: float
    dim: int
    kind: str = "default"  # a key of blocks.rope_scaling.KINDS
    params: Mapping[str, Any] = field(default_factory=dict)  # the scaling's own parameters, as config.json names them


@dataclass(frozen=True)
class QueryScaling:
    """Queries grow with their position, in steps: times 1 + weight * log(1 + (position + offset) // period)."""

    weight: float
    period: int
    offset: int = 0


@dataclass(frozen=True)
class SparseAttention:
    """Single queries of long contexts read only some pages, where requests ask for it or `pages` says so."""

    kind: str = "quest"  # by upper bounds of scores; the first, the last and evenly in between
    pages: int = 0  # of each KV head, for requests that do not say; 0: all


@dataclass(frozen=True)
class Attention:
    """Softmax attention over paged keys and values."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # what scores are multiplied with
    window: int | None = None  # tokens a query sees, itself included; None: all
    chunked: bool = False  # windows do not slide: a query sees from the last multiple of `window` on
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: bool = False  # each head has a learned score that stands for no token
    # RMS norms of queries and keys: of each head, over all heads at once, of each head without weights (L2 norm)
    qk_norm: Literal["head", "all", "unit"] | None = None
    rope: RopeSpec | None = None  # None: queries and keys are not rotated
    query_scaling: QueryScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    gate: bool = False  # what was attended is multiplied with the sigmoid of a product, before the last one
    v_norm: bool = False  # values are RMS-normed, without weights
    v_from_k: bool = False  # values are the keys as they are before norm and rotation
    bidirectional: bool = False  # sees what comes later too: sequences are computed whole, and keep nothing
    kv_from: int | None = None  # attends keys and values of this layer, and has none of its own
    sparse: SparseAttention | None = field(default=None, compare=False)  # layers that differ in it alone are alike

    values_from = None

    @property
    def kv_parts(self) -> int:
        """Products that make keys and values."""
        return 0 if self.kv_from is not None else 1 if self.v_from_k else 2

    @property
    def qkv_width(self) -> int:
        return (self.heads * (2 if self.gate else 1) + self.kv_parts * self.kv_heads) * self.head_dim

    @property
    def kept(self) -> TokenShape | None:
        """What it keeps of a token."""
        if self.bidirectional or self.kv_from is not None:
            return None
        return TokenShape(self.kv_heads, self.head_dim, self.window)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: pages hold one compressed vector a token and its rotated key, which all heads share;
    queries are taken into that space, and what was attended out of it."""

    heads: int
    q_rank: int | None  # queries are compressed too; None: they are not
    kv_rank: int
    nope_dim: int  # of a query that is not rotated
    rope_dim: int
    value_dim: int
    scale: float
    rope: RopeSpec
    bias: bool = False  # of the products that compress, and of the last

    window = None
    chunked = False
    softcap = None
    sinks = False
    qk_norm = None
    query_scaling = None
    bidirectional = False
    kv_heads = 1
    kv_from = None

    @property
    def values_from(self) -> int:
        return self.rope_dim

    @property
    def head_dim(self) -> int:
        """Of a key: rotated, then compressed."""
        return self.rope_dim + self.kv_rank

    @property
    def qkv_width(self) -> int:
        return self.heads * (self.head_dim + self.nope_dim) + self.head_dim

    @property
    def kept(self) -> TokenShape:
        return TokenShape(1, self.head_dim, values_from=self.values_from)


Recurrent = GatedDelta | Mamba2 | ShortConv
Attending = Attention | Latent
Mixer = Attending | Recurrent


@dataclass(frozen=True)
class Dense:
    """One MLP for every token."""

    intermediate: int
    activation: Activation = "silu"
    gated: bool = True  # act(gate) * up, else act(up)
    bias: bool = False

    @property
    def swiglu(self) -> bool:
        return self.gated and self.activation == "silu"

    def width(self, hidden: int) -> int:
        """Numbers that a token takes between the products."""
        return self.intermediate


@dataclass(frozen=True)
class Router:
    """How the experts of a token are chosen, and how much each counts."""

    score: Literal["softmax", "sigmoid"] = "softmax"  # of the logits, over all experts
    normalised: bool = True  # weights of those chosen add up to one
    scale: float = 1.0  # what weights are multiplied with
    bias: bool = False  # of the logits
    correction: bool = False  # a bias of scores by which experts are chosen, not weighed
    weighs_input: bool = False  # an expert's input is multiplied with its weight, not its output
    groups: int = 1  # experts are chosen from `top_groups` of so many groups alone
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"  # of its experts' scores: the best, or the sum of the best two


@dataclass(frozen=True)
class Experts:
    """Several MLPs, of which a router chooses some for each token (mixture of experts); `shared` ones see every
    token."""

    count: int
    top_k: int
    intermediate: int  # of one
    activation: GatedActivation = "silu"
    bias: bool = False
    router: Router = Router()
    shared: int = 0  # intermediate size of the shared expert; 0: none
    shared_gate: bool = False  # its output is multiplied with the sigmoid of a product
    gated: bool = True  # act(gate) * up, else act(up)
    own_norms: bool = False  # shared and routed ones are normed apart, before and behind; the router's input is too
    held: range | None = None  # of an expert-parallel rank: those that it has; None: all

    @property
    def matrices(self) -> int:
        return self.count if self.held is None else len(self.held)

    def width(self, hidden: int) -> int:
        """Between the products and behind them, until what experts say is added up."""
        return self.top_k * (self.intermediate + hidden) + self.shared


@dataclass(frozen=True)
class Norms:
    """Where mixer and feed have norms: before them (pre-norm), after them (post-norm), or both (sandwich)."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    before: bool = True
    after: bool = False
    bias: bool = False  # of LayerNorms
    weight: bool = True  # learned; False: ones
    replaces: bool = False  # what is normed takes the place of the residual stream (BERT)


@dataclass(frozen=True)
class LayerSpec:
    mixer: Mixer
    feed: Dense | Experts | None
    norms: Norms = Norms()
    parallel: Literal["own_norms", "one_norm"] | None = None  # mixer and feed read the same residual; None: in turn
    input_activation: Activation = "gelu_tanh"  # where there are per-layer embeddings: of their gate
    scaled: bool = False  # what leaves the layer is multiplied with a learned number


@dataclass(frozen=True)
class ClassHead:
    """Scores of classes, from one token of a sequence."""

    labels: int
    pooled: Literal["cls", "last"]  # the first token, or the last
    dense: bool = False  # behind a product and tanh
    bias: bool = False


@dataclass(frozen=True)
class DecoderSpec:
    """Embed, layers, final norm (of the last layer's kind), head. Encoders are such, but that their attention is
    bidirectional."""

    architecture: str
    vocab_size: int
    hidden: int
    max_position: int  # what it was trained for
    layers: tuple[LayerSpec, ...]
    tie_embeddings: bool = False
    learned_positions: bool = False  # one vector a position, added to the embeddings
    position_offset: int = 0  # learned positions are counted from here
    token_types: int = 0  # vectors of segments, added to the embeddings; ids of segment n are those of tokens, plus n
    # times the size of the vocabulary
    class_head: ClassHead | None = None
    layer_input: int = 0  # width of per-layer embeddings: a vector a layer, of each token; 0: none
    embedding_scale: float = 1.0  # embeddings are multiplied with it
    residual_scale: float = 1.0  # what mixers and feeds add to the residual stream is
    logit_scale: float = 1.0  # logits are
    logit_softcap: float | None = None  # logits become softcap * tanh(logit / softcap)

    @cached_property
    def rope_kinds(self) -> list[int]:
        """By layer: the first layer whose queries and keys are rotated alike, or not at all like its own."""
        return _first_alike([layer.mixer.rope for layer in self.layers])

    def sparsified(self, sparse: SparseAttention) -> DecoderSpec:
        """With sparse attention wherever it makes sense: not in the first layers, whose attention is spread out, nor
        within windows."""
        layers = [
            replace(layer, mixer=replace(layer.mixer, sparse=sparse))
            if index >= DENSE_LAYERS and isinstance(layer.mixer, Attention) and layer.mixer.window is None
            else layer
            for index, layer in enumerate(self.layers)
        ]
        return replace(self, layers=tuple(layers))

    @cached_property
    def attending(self) -> dict[int, Attending]:
        """The layers that attend, and how."""
        return {i: layer.mixer for i, layer in enumerate(self.layers) if isinstance(layer.mixer, Attending)}

    @property
    def recurrent(self) -> bool:
        """Whether there are layers that keep a state."""
        return len(self.attending) < len(self.layers)

    @cached_property
    def last_kept(self) -> int:
        """The last layer that keeps anything of a token or a sequence: behind it, only those asked for matter. Of an
        encoder -1."""
        return max((i for i, layer in enumerate(self.layers) if layer.mixer.kept is not None), default=-1)

    @property
    def encoder(self) -> bool:
        """Whether sequences are computed whole, and nothing is kept of them."""
        return self.last_kept < 0

    @property
    def attention(self) -> Attending:
        """Of the first layer that has any."""
        return next(iter(self.attending.values()))

    @property
    def kv_heads(self) -> int:
        return self.attention.kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @cached_property
    def mixer_kinds(self) -> list[int]:
        """By layer: the first layer whose attention, once there are queries and keys, is the same but for its scale.
        One plan of a step serves a kind."""
        return _first_alike([_attended(layer.mixer) for layer in self.layers])

    @cached_property
    def layer_kinds(self) -> list[int]:
        """By layer: the first layer that launches the same kernels."""
        return _first_alike([replace(layer, mixer=_unscaled(layer.mixer)) for layer in self.layers])

    @property
    def token_width(self) -> int:
        """Numbers that a token of a step takes at most while its widest layer runs, roughly."""
        qkv = max(layer.mixer.qkv_width for layer in self.layers)
        feed = max(layer.feed.width(self.hidden) for layer in self.layers if layer.feed is not None)
        chunked = max(_chunked_width(layer.mixer) for layer in self.layers)
        return 6 * self.hidden + 3 * qkv + max(3 * feed, chunked)

    def kv_refusal(self, dtype: str, kinds: Collection[str]) -> str | None:
        """Why there are no KV pages of this kind where `kinds` can be run; None: there are."""
        if dtype not in kinds:
            return f"what runs {self.architecture} here takes pages of {', '.join(kinds)}"
        odd = [mixer.head_dim for mixer in self.attending.values() if mixer.head_dim % 2 or mixer.head_dim > 256]
        if dtype == "int4" and odd:
            return f"4-bit pages take heads of an even number of up to 256 dimensions, not {odd[0]}"
        return self._residual_refusal(128 // KINDS[dtype].bits) if KINDS[dtype].residual else None

    def _residual_refusal(self, unit: int) -> str | None:
        """Why keys cannot be rounded over tokens; `unit`: numbers of a head that fill whole vectors of bytes."""
        for mixer in self.attending.values():
            if not isinstance(mixer, Attention):
                return "latent attention has no keys of its own"
            if mixer.head_dim % unit or mixer.head_dim > 256:
                return f"heads must be of {unit}, {2 * unit} .. 256 dimensions, not {mixer.head_dim}"
        return "recurrent layers keep a state beside them" if self.recurrent else None

    def kv_layout(self, *, page_size: int, dtype: str, own: str = "") -> KVLayout:
        """`own`: what the latest tokens are kept in, where the kind has a residual."""
        return layout_for([layer.mixer.kept for layer in self.layers], page_size=page_size, dtype=dtype, own=own)


def _chunked_width(mixer: Mixer) -> int:
    """Numbers of 16 bits, of those in float32 two, that a token takes in the parallel form of a recurrent layer."""
    match mixer:
        case GatedDelta():
            return 48 * mixer.values
        case Mamba2():
            return 16 * (mixer.inner + 2 * mixer.heads * mixer.state_size)
        case _:
            return 0


def _unscaled(mixer: Mixer) -> Mixer:
    return replace(mixer, scale=0.0) if isinstance(mixer, Attending) else mixer


def _attended(mixer: Mixer) -> Mixer:
    """Without what is done before there are queries, keys and values."""
    if not isinstance(mixer, Attention):
        return _unscaled(mixer)
    plain = replace(mixer, scale=0.0, rope=None, query_scaling=None)
    return replace(plain, kv_from=None, v_norm=False, v_from_k=False)


def _first_alike(items: Sequence[object]) -> list[int]:
    """For each, the index of the first that equals it."""
    firsts: list[int] = []
    found: list[int] = []
    for index, item in enumerate(items):
        first = next((i for i in firsts if items[i] == item), index)
        if first == index:
            firsts.append(index)
        found.append(first)
    return found


def sparse_at(spec: DecoderSpec, index: int) -> bool:
    """Whether queries of a layer may read only some pages."""
    mixer = spec.layers[index].mixer
    return isinstance(mixer, Attention) and mixer.sparse is not None
