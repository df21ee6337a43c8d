"""What recurrent mixers share: a short causal convolution, and the pass over a step's segments.

Every round reads all states that it goes on from before it writes any, so that a cell may change hands within a step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.kernels.state_views import LayerState, Round, Segments
from quire.model.blocks.linear import Plain
from quire.model.loading.stored_tensor import StoredTensor
from quire.model.ranks import Ranks
from quire.types.errors import ConfigError

ConvMaker = Callable[[int, int, bool], "CausalConv"]  # channels, taps, bias
VectorMaker = Callable[[int], Plain]  # of float32
# Inputs of some segments' tokens, their windows and matrices → outputs of the tokens, windows and matrices behind them
Pass = Callable[[Segments, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class CausalConv(Plain):
    """A depthwise convolution: of each channel, its last inputs weighed. Files have it as [channels, 1, taps]."""

    def __init__(self, channels: int, taps: int, *, bias: bool, device: torch.device, dtype: torch.dtype):
        super().__init__((channels, taps), device=device, dtype=dtype)
        self.bias = torch.empty(channels, device=device, dtype=dtype) if bias else None

    def needs(self) -> dict[tuple[str, int], tuple[int, ...]]:
        channels, taps = self.weight.shape
        return {("weight", 0): (channels, 1, taps)} | ({} if self.bias is None else {("bias", 0): (channels,)})

    def load(self, kind: str, part: int, stored: StoredTensor) -> None:
        stored.copy_into(self.tensors()[kind])

    def __call__(self, segments: Segments, x: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, channels] behind windows [segments, taps - 1, channels] → the same, and the windows behind it."""
        window = window.to(x.dtype)
        taps = self.weight.shape[1]
        if segments.single:
            seen = torch.cat((window, x[:, None]), dim=1)
            out = torch.einsum("stc,ct->sc", seen, self.weight)
            return out if self.bias is None else out + self.bias, seen[:, 1:]
        entries = torch.cat((x, window.flatten(0, 1)))
        seen, last = segments.taps(taps)
        out = entries[seen[:, 0]] * self.weight[:, 0]
        for tap in range(1, taps):
            out.addcmul_(entries[seen[:, tap]], self.weight[:, tap])
        return out if self.bias is None else out.add_(self.bias), entries[last]


def run_rounds(width: int, x: torch.Tensor, state: LayerState, rounds: list[Round], one: Pass) -> torch.Tensor:
    """[tokens, width] of all tokens; states go from cell to cell."""
    out = x.new_empty(x.shape[0], width)
    for segments in rounds:
        states = [(state.window[some.sources], state.matrix[some.sources]) for some in segments]
        for some, (window, matrix) in zip(segments, states, strict=True):
            mixed, window, matrix = one(some, window, matrix)
            state.window[some.targets] = window.float()
            state.matrix[some.targets] = matrix
            if some.whole:
                out = mixed.to(x.dtype)
            else:
                out[some.index()] = mixed.to(x.dtype)
    return out


def single_round(rounds: list[Round]) -> Segments | None:
    """A step's only segments, where each row has one token and leaves its state in nobody else's cell."""
    if len(rounds) != 1 or len(rounds[0]) != 1:
        return None
    one = rounds[0][0]
    return one if one.single and one.whole and one.apart else None


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    groups: int = 1,
    gate_first: bool,
    ranks: Ranks | None = None,
) -> torch.Tensor:
    """RMS norm of x [..., n], float32, over each of `groups` parts, times SiLU of a gate before it or behind it.
    `ranks`: those that have the other parts of what it is taken over."""
    gate = torch.nn.functional.silu(gate.float())
    if gate_first:
        x = x * gate
    parts = x.unflatten(-1, (groups, -1))
    squares = parts.pow(2).mean(-1, keepdim=True)
    if ranks is not None:
        squares = ranks.reduce(squares) / ranks.size
    normed = (parts * torch.rsqrt(squares + eps)).flatten(-2) * weight.float()
    return normed if gate_first else normed * gate


class StateMixer:
    """What a recurrent mixer is to those who look for attention."""

    rotates = False

    def rescale_keys(self, factor: torch.Tensor) -> None:
        raise ConfigError("keys scaled by channel are for attention, and this model has recurrent layers")
