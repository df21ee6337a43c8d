"""A decoder: its weights in memory, and the pass from token ids to hidden states and logits.

One class runs every family; what differs is in the spec. Refuses to know: files, requests, sampling.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch

from quire.kernels.attention_backend import AttentionSpec, Batch
from quire.kernels.hidden_state_tap import HiddenStateTap
from quire.kernels.kv_views import KVViews
from quire.model.blocks.fused import choose_stages
from quire.model.blocks.rope_scaling import inverse_frequencies
from quire.model.blocks.stages import Layer, Step
from quire.model.decoder_spec import DecoderSpec
from quire.model.quantization.scheme import DenseScheme, Linear, Plain, QuantScheme
from quire.types.errors import ConfigError


class Model:
    """Weights are unfilled until `load_model` (or a test) fills them and calls `finish`.

    `length` is the longest context that will be served; it matters only to RoPE scalings that depend on it.
    `invariant`: a row's bits may not depend on what runs beside it.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        device: torch.device,
        dtype: torch.dtype,
        length: int | None = None,
        scheme: QuantScheme | None = None,
        invariant: bool = False,
    ):
        self.spec = spec
        self.device = device
        self.dtype = dtype
        self.length = length or spec.max_position
        if spec.rope is None and self.length > spec.max_position:
            raise ConfigError(
                f"a context of {self.length} tokens was asked for, but the model has only {spec.max_position} learned "
                f"positions; ask for at most {spec.max_position}"
            )
        self.scheme = scheme or DenseScheme()
        self.stages = choose_stages(spec, device, invariant=invariant)
        self.embed = self._plain(spec.vocab_size, spec.hidden)
        self.positions = None if spec.rope else self._plain(spec.max_position, spec.hidden)
        self.layers = [self._layer(index) for index in range(spec.layers)]
        self.final_norm = self._norm(spec.hidden)
        tied = self.embed.weight if spec.tie_embeddings else None
        self.head = self._linear(spec.hidden, (spec.vocab_size,), bias=False, layer=False, tied=tied)
        divided = spec.rope is not None and spec.rope.kind == "divisors"
        self.rope_divisors = self._plain(spec.rope.dim // 2) if divided and spec.rope else None

    def _plain(self, *shape: int, bias: bool = False) -> Plain:
        return Plain(shape, bias=bias, device=self.device, dtype=self.dtype)

    def _norm(self, size: int) -> Plain:
        return self._plain(size, bias=self.spec.norm == "layer")

    def _linear(
        self, columns: int, parts: tuple[int, ...], *, bias: bool, layer: bool = True, tied: torch.Tensor | None = None
    ) -> Linear:
        scheme = self.scheme if layer else DenseScheme()  # the head decides between near-equals: it stays as it is
        return Linear(columns, parts, bias=bias, scheme=scheme, device=self.device, dtype=self.dtype, tied=tied)

    def _layer(self, index: int) -> Layer:
        spec = self.spec
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        up = (spec.intermediate,) * (2 if spec.gated_mlp else 1)
        return Layer(
            index=index,
            attention=AttentionSpec(
                spec.heads, spec.kv_heads, spec.head_dim, spec.scales[index], spec.windows[index], self.dtype.itemsize
            ),
            input_norm=self._norm(spec.hidden),
            qkv=self._linear(spec.hidden, (queries, keys, keys), bias=spec.qkv_bias),
            o=self._linear(queries, (spec.hidden,), bias=spec.o_bias),
            post_norm=self._norm(spec.hidden),
            up=self._linear(spec.hidden, up, bias=spec.mlp_bias),
            down=self._linear(spec.intermediate, (spec.hidden,), bias=spec.mlp_bias),
            q_norm=self._plain(spec.head_dim) if spec.qk_norm else None,
            k_norm=self._plain(spec.head_dim) if spec.qk_norm else None,
        )

    def modules(self) -> dict[str, Linear | Plain]:
        """Everything that holds weights, by the names that `Target` uses."""
        named: dict[str, Linear | Plain | None] = {
            "embed": self.embed,
            "positions": self.positions,
            "rope_divisors": self.rope_divisors,
            "final_norm": self.final_norm,
            "head": self.head,
        }
        for layer in self.layers:
            parts = ("input_norm", "qkv", "q_norm", "k_norm", "o", "post_norm", "up", "down")
            named |= {f"layers.{layer.index}.{part}": getattr(layer, part) for part in parts}
        return {name: module for name, module in named.items() if module is not None}

    @property
    def kv_dtype(self) -> str:
        """What K and V are kept in unless others are asked for."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def kv_kinds(self) -> tuple[str, ...]:
        """The kinds of pages it can run on."""
        return (self.kv_dtype, *self.stages.kv_kinds)

    def rescale_keys(self, factors: torch.Tensor) -> None:
        """Queries times factors [layers, kv_heads, head_dim], keys by them: what and why, `model.channels` says."""
        for layer, factor in zip(self.layers, factors.to(self.device), strict=True):
            most = factor.max()
            layer.attention = replace(layer.attention, scale=layer.attention.scale / most.item())
            if layer.q_norm is not None and layer.k_norm is not None:
                layer.q_norm.weight *= factor[0]
                layer.k_norm.weight *= most / factor[0]
            else:
                queries = factor.repeat_interleave(self.spec.heads // self.spec.kv_heads, dim=0)
                layer.qkv.scale(torch.cat((queries, most / factor, torch.ones_like(factor))).flatten())

    @property
    def inverse_frequencies(self) -> torch.Tensor | None:
        """By which keys are rotated, [rotary / 2]; None: positions are learned."""
        return self._frequencies if self.spec.rope is not None else None

    @property
    def reasons(self) -> list[str]:
        """What was chosen to run it, and why."""
        return self.stages.reasons

    def to(self, device: torch.device) -> None:
        """Move all weights, each tensor staying the object it is (a head may be tied to the embeddings)."""
        for module in self.modules().values():
            for tensor in module.tensors().values():
                tensor.data = tensor.data.to(device)

    def finish(self) -> None:
        """Compute what depends on weights or lives beside them, once they are in place."""
        if self.spec.rope is not None:
            frequencies, self._rope_scale = inverse_frequencies(self.spec.rope, self.spec.max_position, self.length)
            self._frequencies = frequencies.to(self.device)
            if self.rope_divisors is not None:
                self._frequencies /= self.rope_divisors.weight.float()

    def forward(
        self,
        input_ids: torch.Tensor,
        batch: Batch,
        kv: KVViews,
        *,
        last: bool = False,
        tap: HiddenStateTap | None = None,
    ) -> torch.Tensor:
        """Token ids [tokens] → hidden states after the final norm [tokens, hidden]; K and V go to their pages.
        `last`: of each row's last token only, [rows, hidden]; the others end with their K and V of the last layer."""
        stages = self.stages
        residual, step = self._begin(input_ids, batch, kv)
        x: torch.Tensor | None = None
        shown = []
        for layer in self.layers:
            q = stages.qkv(layer, x, residual, step)
            if last and layer is self.layers[-1] and batch.tokens > batch.rows:
                q, residual, step = q[batch.ends], residual[batch.ends], Step(batch.last(), kv, None)
            x = stages.attend(layer, q, residual, step)
            x = stages.mlp(layer, x, residual)
            if tap is not None and layer.index in tap.layers:
                here = residual.clone() if x is None else residual + x  # the next norm writes into the residual
                shown.append(here if len(here) == batch.rows else here[batch.ends])
        if tap is not None:
            tap.states = shown
        return stages.norm(self.final_norm, x, residual)

    def shallow(self, input_ids: torch.Tensor, batch: Batch, kv: KVViews, layer: int) -> None:
        """Only K and V of the first layers, up to those of `layer`, go to their pages."""
        residual, step = self._begin(input_ids, batch, kv)
        x: torch.Tensor | None = None
        for whole in self.layers[:layer]:
            x = self.stages.attend(whole, self.stages.qkv(whole, x, residual, step), residual, step)
            x = self.stages.mlp(whole, x, residual)
        self.stages.qkv(self.layers[layer], x, residual, step)

    def _begin(self, input_ids: torch.Tensor, batch: Batch, kv: KVViews) -> tuple[torch.Tensor, Step]:
        """Embeddings [tokens, hidden], and what the layers share."""
        ops, rope = self.stages.ops, None
        residual = ops.take(self.embed.weight, input_ids)
        if self.positions is not None:
            residual += ops.take(self.positions.weight, batch.positions)
        else:
            rope = ops.rope_tables(batch.positions, self._frequencies, self._rope_scale, self.dtype)
        return residual, Step(batch, kv, rope)

    def sketch(self) -> Model:
        """With one layer of each kind, and the last: launches all that the whole does, and computes nothing of use."""
        firsts = {layer.attention.window: layer.index for layer in reversed(self.layers)}
        made = copy(self)
        made.layers = [layer for layer in self.layers if layer.index in {*firsts.values(), self.layers[-1].index}]
        return made

    def attention(self, batch: Batch, kv: KVViews) -> None:
        """Only attention, by queries of zeros: it takes longest to compile, and waits for nothing before it here."""
        q = torch.zeros(batch.tokens, self.spec.heads, self.spec.head_dim, device=self.device, dtype=self.dtype)
        step = Step(batch, kv, None)
        for layer in self.layers:
            self.stages.attention(layer, q, step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden] → logits [rows, vocabulary], in the dtype the head computes in."""
        return self.stages.head(self.head, hidden)
