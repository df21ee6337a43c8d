"""A decoder's weights as the compiled program takes them: structs of csrc/decoder.h, of tensors and packed matrices.

Vectors are float32; what is None is absent. Refuses to know: where weights came from, how they are computed with.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quire.kernels.cpu.matrix_packing import PackedMatrix

ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_tanh",
    "quick_gelu",
    "relu",
    "relu2",
    "swiglu_oai",
)  # as csrc/kernels.h numbers them
IN_TURN, ONE_NORM, OWN_NORMS = range(3)  # mixer and feed


@dataclass
class Norm:
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    eps: float = 1e-6
    centred: bool = False


@dataclass
class Linear:
    w: PackedMatrix
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.bias is not None:  # kernels read whole groups of 16
            self.bias = torch.nn.functional.pad(self.bias.float(), (0, -len(self.bias) % 16))


@dataclass
class Rotation:
    inverse_frequencies: torch.Tensor  # [rotary / 2]
    scale: float = 1.0

    @property
    def half(self) -> int:
        return len(self.inverse_frequencies)


@dataclass
class Attention:
    q: Linear
    o: Linear
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    k: Linear | None = None  # None: keys and values are those of layer `kept_by`
    v: Linear | None = None  # None, with k: values are the keys before norm and rotation
    gate: Linear | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    norms_all: bool = False
    rotation: int = 0  # of the decoder's; -1: none
    window: int = 0
    chunked: bool = False
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    sparse: bool = False
    scaling_weight: float = 0.0
    scaling_period: int = 0
    scaling_offset: int = 0
    kept_by: int | None = None
    kv_group: int = 0  # both come with the KV of the first step
    place: int = 0


@dataclass
class Latent:
    q_down: Linear | None
    q_up: Linear
    kv_down: Linear
    k_rotary: Linear
    o: Linear
    k_up: list[PackedMatrix]
    v_up: list[PackedMatrix]
    q_norm: Norm | None
    kv_norm: Norm
    heads: int
    rank: int
    rest: int
    rotary: int
    value_dim: int
    rotation: int
    scale: float
    kept_by: int | None = None
    kv_group: int = 0
    place: int = 0


@dataclass
class State:
    """Addresses in the first cell."""

    window: int = 0
    matrix: int = 0


@dataclass
class Convolution:
    weight: torch.Tensor  # [taps, channels]
    bias: torch.Tensor | None

    @property
    def taps(self) -> int:
        return self.weight.shape[0]

    @property
    def channels(self) -> int:
        return self.weight.shape[1]


@dataclass
class GatedNorm:
    weight: torch.Tensor
    width: int
    part: int
    eps: float
    gate_first: bool

    @property
    def weights(self) -> int:
        return len(self.weight)


@dataclass
class GatedDelta:
    q: Linear
    k: Linear
    v: Linear
    z: Linear
    o: Linear
    ba: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    conv: Convolution
    norm: GatedNorm
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tiled: bool
    state: State = field(default_factory=State)  # comes with the KV of the first step


@dataclass
class Mamba2:
    gate: Linear
    xbc: Linear
    dt: Linear
    o: Linear
    decay: torch.Tensor
    dt_bias: torch.Tensor
    d: torch.Tensor
    conv: Convolution
    norm: GatedNorm
    heads: int
    head_dim: int
    groups: int
    state_size: int
    dt_least: float
    dt_most: float
    state: State = field(default_factory=State)


@dataclass
class ShortConv:
    b: Linear
    c: Linear
    x: Linear
    o: Linear
    conv: Convolution
    state: State = field(default_factory=State)


@dataclass
class Mlp:
    gate: Linear | None
    up: Linear
    down: Linear
    activation: int

    @property
    def width(self) -> int:
        return self.up.w.rows


@dataclass
class Router:
    weight: torch.Tensor  # [experts, hidden]
    bias: torch.Tensor | None
    correction: torch.Tensor | None
    scales: torch.Tensor | None
    sigmoid: bool
    normalised: bool
    weighs_input: bool
    groups: int
    top_groups: int
    best_two: bool
    logit_scale: float
    scale: float


@dataclass
class Experts:
    router: Router
    expert: list[Mlp]
    shared: Mlp | None
    shared_gate: torch.Tensor | None
    top_k: int
    router_norm: Norm | None = None
    norm: Norm | None = None
    post_norm: Norm | None = None
    shared_post_norm: Norm | None = None

    @property
    def count(self) -> int:
        return len(self.expert)


@dataclass
class LayerInput:
    gate: Linear | None
    up: Linear | None
    norm: Norm | None
    activation: int
    scale: float


@dataclass
class Layer:
    """One of the mixers, and one of the feeds or none."""

    attention: Attention | None = None
    latent: Latent | None = None
    delta: GatedDelta | None = None
    mamba: Mamba2 | None = None
    conv: ShortConv | None = None
    mlp: Mlp | None = None
    experts: Experts | None = None
    input: LayerInput | None = None
    mixer_norm: Norm | None = None
    mixer_post_norm: Norm | None = None
    feed_norm: Norm | None = None
    feed_post_norm: Norm | None = None
    parallel: int = IN_TURN


@dataclass
class Decoder:
    hidden: int
    embed: PackedMatrix
    head: PackedMatrix
    final_norm: Norm
    rotation: list[Rotation]
    layer: list[Layer]
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    positions: torch.Tensor | None = None
    position_offset: int = 0
    input_table: PackedMatrix | None = None
    input_product: PackedMatrix | None = None
    input_norm: Norm | None = None
    input_width: int = 0

    @property
    def layers(self) -> int:
        return len(self.layer)

    @property
    def rotations(self) -> int:
        return len(self.rotation)

    @property
    def most_positions(self) -> int:
        return 0 if self.positions is None else len(self.positions)
