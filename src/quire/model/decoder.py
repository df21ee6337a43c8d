"""A decoder: its weights in memory, and the pass from token ids to hidden states and logits.

One class runs every family; what differs is in the spec. Refuses to know: files, requests, sampling.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import partial

import torch

from quire.kernels.attention_backend import Batch
from quire.kernels.context_split import ContextSplit
from quire.kernels.hidden_state_tap import HiddenStateTap
from quire.kernels.kv_views import KVViews
from quire.kernels.library.cudnn_prefill import CudnnPrefill
from quire.model.blocks.attention import AttentionBlock, LinearMaker
from quire.model.blocks.class_head import ClassHeadBlock
from quire.model.blocks.context_stages import whole_step
from quire.model.blocks.dense import DenseBlock
from quire.model.blocks.experts import ExpertsBlock
from quire.model.blocks.fused import choose_stages
from quire.model.blocks.gated_delta import GatedDeltaBlock
from quire.model.blocks.latent import LatentBlock
from quire.model.blocks.layer_inputs import LayerInputs, LayerTail
from quire.model.blocks.linear import Linear, Module, Plain
from quire.model.blocks.low_rank import LowRank, Updates
from quire.model.blocks.mamba2 import Mamba2Block
from quire.model.blocks.norms import Norm
from quire.model.blocks.recurrent import CausalConv
from quire.model.blocks.rope_scaling import NO_ROTATION, Scaled, inverse_frequencies
from quire.model.blocks.short_conv import ShortConvBlock
from quire.model.blocks.stages import AttendingBlock, MixerBlock, Step
from quire.model.decoder_spec import DecoderSpec, Experts, Latent, Norms
from quire.model.quantization.dense_scheme import DenseScheme
from quire.model.quantization.scheme import QuantScheme
from quire.model.ranks import Ranks
from quire.model.recurrent_spec import GatedDelta, Mamba2, ShortConv
from quire.model.sharding import vocabulary_rows
from quire.types.errors import ConfigError
from quire.types.kv import KVLayout


@dataclass
class Layer:
    index: int
    mixer: MixerBlock
    feed: DenseBlock | ExpertsBlock | None
    tail: LayerTail | None
    parallel: bool


class Model:
    """Weights are unfilled until `load_model` (or a test) fills them and calls `finish`.

    `length` is the longest context that will be served; it matters only to RoPE scalings that depend on it.
    `invariant`: a row's bits may not depend on what runs beside it. `ranks`: with which it runs a model that `spec` is
    a part of (`sharding.py`, `pipeline.py`).
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
        ranks: Ranks | None = None,
    ):
        self.spec = spec
        self.pipeline = ranks if ranks is not None and ranks.pipeline else None
        self.context = ranks if ranks is not None and ranks.context else None
        if self.context is not None:
            ranks = self.context.tensor
        ranks = self.ranks = None if self.pipeline is not None else ranks
        self.device = device
        self.dtype = dtype
        self.length = length or spec.max_position
        if spec.learned_positions and self.length > spec.max_position:
            raise ConfigError(
                f"a context of {self.length} tokens was asked for, but the model has only {spec.max_position} learned "
                f"positions; ask for at most {spec.max_position}"
            )
        self.scheme: QuantScheme = scheme or DenseScheme()
        self._dense: QuantScheme = DenseScheme()
        if invariant:
            self.scheme, self._dense = self.scheme.invariant(), self._dense.invariant()
        self.stages = choose_stages(spec, device, invariant=invariant, ranks=self.context or ranks)
        self.notes: list[str] = []  # what whoever made it adds to `describe`
        tokens = spec.vocab_size if ranks is None else vocabulary_rows(spec.vocab_size, ranks.size)
        places = spec.max_position + spec.position_offset
        if self.pipeline is not None and self.pipeline.rank:  # only the first stage embeds, and has the head
            tokens = places = 0
        self.embed = self._plain(tokens, spec.hidden)
        self.positions = self._plain(places, spec.hidden) if spec.learned_positions else None
        self.token_types = self._plain(spec.token_types, spec.hidden) if spec.token_types else None
        self.class_head = ClassHeadBlock.build(spec, partial(self._linear, scheme=self._dense))
        made = LayerInputs.build(spec, self._linear, self._norm, self._plain) if spec.layer_input else None
        self.layer_inputs = made
        self.layers = [self._layer(index) for index in range(len(spec.layers))]
        self.final_norm = self._norm(spec.hidden, spec.layers[-1].norms)
        tied = self.embed.weight if spec.tie_embeddings else None
        self.head = self._linear(spec.hidden, (tokens,), False, self._dense, tied)
        divided = [rope for layer in spec.layers if (rope := layer.mixer.rope) and rope.kind == "divisors"]
        self.rope_divisors = self._plain(divided[0].dim // 2) if divided else None
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()  # rounded as a tensor's would be

    def _plain(self, *shape: int) -> Plain:
        return Plain(shape, device=self.device, dtype=self.dtype)

    def _norm(self, size: int, norms: Norms) -> Norm:
        return Norm(size, norms, device=self.device, dtype=self.dtype)

    def _linear(
        self,
        columns: int,
        parts: tuple[int, ...],
        bias: bool,
        scheme: QuantScheme | None = None,
        tied: torch.Tensor | None = None,
    ) -> Linear:
        """`scheme`, of the head, which decides between near-equals, and of experts: those stay as they are."""
        scheme = scheme or self.scheme
        return Linear(columns, parts, bias=bias, scheme=scheme, device=self.device, dtype=self.dtype, tied=tied)

    def _conv(self, channels: int, taps: int, bias: bool) -> CausalConv:
        return CausalConv(channels, taps, bias=bias, device=self.device, dtype=self.dtype)

    def _vector(self, size: int) -> Plain:
        return Plain((size,), device=self.device, dtype=torch.float32)

    def _layer(self, index: int) -> Layer:
        feed: DenseBlock | ExpertsBlock | None = None
        dense = partial(self._linear, scheme=self._dense)
        mixer = self._mixer(index, dense)
        if isinstance(self.spec.layers[index].feed, Experts):
            feed = ExpertsBlock.build(self.spec, index, dense, self._norm)
        elif self.spec.layers[index].feed is not None:
            feed = DenseBlock.build(self.spec, index, self._linear, self._norm)
        parallel = self.spec.layers[index].parallel
        if parallel == "one_norm" and feed is not None:
            feed.norm = mixer.norm
        tail = LayerTail.build(self.spec, index, self._linear, self._norm, self._plain)
        return Layer(index, mixer, feed, tail, parallel is not None)

    def _mixer(self, index: int, dense: LinearMaker) -> MixerBlock:
        spec, linear, norm, size = self.spec, self._linear, self._norm, self.dtype.itemsize
        match spec.layers[index].mixer:
            case Latent():
                return LatentBlock.build(spec, index, size, linear, dense, norm)
            case GatedDelta():
                return GatedDeltaBlock.build(spec, index, linear, dense, norm, self._conv, self._vector)
            case Mamba2():
                return Mamba2Block.build(spec, index, linear, norm, self._conv, self._vector, self.ranks)
            case ShortConv():
                return ShortConvBlock.build(spec, index, linear, norm, self._conv)
            case _:
                return AttentionBlock.build(spec, index, size, linear, norm, self._plain)

    def modules(self) -> dict[str, Module]:
        """Everything that holds weights, by the names that `Target` uses; what two blocks share, once."""
        named: dict[str, Module | None] = {
            "embed": self.embed,
            "positions": self.positions,
            "token_types": self.token_types,
            "rope_divisors": self.rope_divisors,
            "final_norm": self.final_norm,
            "head": self.head,
            **(self.class_head.modules() if self.class_head is not None else {}),
            **(self.layer_inputs.modules() if self.layer_inputs is not None else {}),
        }
        for layer in self.layers:
            inner = layer.mixer.modules() | (layer.feed.modules() if layer.feed is not None else {})
            inner |= layer.tail.modules() if layer.tail is not None else {}
            named |= {f"layers.{layer.index}.{name}": module for name, module in inner.items()}
        owners = {id(module): name for name, module in reversed(named.items())}
        return {name: module for name, module in named.items() if module is not None and owners[id(module)] == name}

    def adaptable(self) -> dict[str, Linear]:
        """Matrices that LoRA adapters may update, by name: projections of attention, into and out of dense MLPs."""
        found: dict[str, Linear] = {}
        for layer in self.layers:
            inner = {"o": layer.mixer.o}
            if isinstance(layer.mixer, AttentionBlock):
                inner["qkv"] = layer.mixer.qkv
            if isinstance(layer.feed, DenseBlock):
                inner |= {"up": layer.feed.up, "down": layer.feed.down}
            found |= {f"layers.{layer.index}.{name}": linear for name, linear in inner.items()}
        return found

    adapter_slots = 0

    def reserve_adapters(self, slots: int, rank: int) -> None:
        self.adapter_slots, like = slots, self.embed.weight
        for linear in self.adaptable().values():
            linear.lora = LowRank(slots, rank, linear.columns, linear.parts, like)

    def set_adapter(self, slot: int, updates: Updates) -> None:
        for name, linear in self.adaptable().items():
            assert linear.lora is not None, "reserve_adapters() comes first"
            linear.lora.put(slot, updates.get(name, {}))

    @property
    def updated(self) -> int:
        return sum(linear.lora is not None and linear.lora.used for linear in self.adaptable().values())

    threads = None  # it computes on torch's
    sampling = None

    @property
    def kv_dtype(self) -> str:
        """What K and V are kept in unless others are asked for."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def kv_kinds(self) -> tuple[str, ...]:
        """The kinds of pages it can run on."""
        latent = any(isinstance(layer.mixer, Latent) for layer in self.spec.layers)
        plain = latent and self.device.type != "cpu"  # the kernels that run it there know no scales
        return (self.kv_dtype,) if plain else (self.kv_dtype, *self.stages.kv_kinds)

    def rescale_keys(self, factors: torch.Tensor) -> None:
        """Queries times factors [layers, kv_heads, head_dim], keys by them: what and why, `key_channel_scales` says."""
        for layer, factor in zip(self.layers, factors.to(self.device), strict=True):
            layer.mixer.rescale_keys(factor)

    @property
    def ropes(self) -> dict[int, Scaled]:
        """Inverse frequencies, and what cos and sin are multiplied with, by kind of rotation."""
        return self._ropes

    @property
    def inverse_frequencies(self) -> list[torch.Tensor] | None:
        """By which keys are rotated, [rotary / 2] each, by layer; None: positions are learned."""
        if self.spec.learned_positions:
            return None
        return [self._ropes[kind][0] for kind in self.spec.rope_kinds]

    def describe(self) -> list[str]:
        """What was chosen to run it and why, for people."""
        dense = [] if isinstance(self.scheme, DenseScheme) else sorted(self._kept_dense())
        kept = (
            [f"{' and '.join(dense)}: in {self.kv_dtype}, {self.scheme.name} has no products for them"] if dense else []
        )
        return [*self.stages.describe(self.scheme), *kept, *self.notes]

    def _kept_dense(self) -> set[str]:
        """What the scheme of the other matrices leaves as it is, the head aside."""
        experts = {"experts" for layer in self.spec.layers if isinstance(layer.feed, Experts)}
        return experts | {"latent up-projections" for layer in self.spec.layers if isinstance(layer.mixer, Latent)}

    def forget_pages(self) -> None:
        """Nothing: it keeps none."""

    def weights(self) -> Iterator[torch.Tensor]:
        """All tensors; a head may be tied to the embeddings, and come twice."""
        for module in self.modules().values():
            yield from module.tensors().values()

    def finish(self, *, mapped: bool = False) -> None:
        """Compute what depends on weights or lives beside them, once they are in place. `mapped`: they are those of a
        model for which it was done."""
        for linear in (m for m in self.modules().values() if isinstance(m, Linear) and not mapped):
            linear.scheme.finish(linear.state)
        self._ropes: dict[int, Scaled] = {}  # inverse frequencies and scale, by kind
        for kind in set(self.spec.rope_kinds):
            rope = self.spec.layers[kind].mixer.rope
            frequencies, scale = inverse_frequencies(rope or NO_ROTATION, self.spec.max_position, self.length)
            frequencies = frequencies.to(self.device)
            if rope is not None and rope.kind == "divisors" and self.rope_divisors is not None:
                frequencies /= self.rope_divisors.weight.float()
            self._ropes[kind] = frequencies, scale
        attending = (m for layer in self.layers if isinstance(m := layer.mixer, AttendingBlock))
        self._rotated = sorted({mixer.rope for mixer in attending if mixer.rotates or self.stages.rotates_all})

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
        `last`: of each row's last token only, [rows, hidden]; the others end with their K and V of the last layer that
        keeps any."""
        stages, pipeline = self.stages, self.pipeline
        if self.context is not None:
            batch = ContextSplit(batch, self.context.rank, self.context.size).batch()
            input_ids = input_ids[batch.context.tokens]
        residual, step = self._begin(input_ids, batch, kv)
        x: torch.Tensor | None = None
        shown, cut = [], last and (pipeline is None or pipeline.rank == pipeline.size - 1)
        for layer in self.layers:
            q = stages.qkv(layer.mixer, x, residual, step)
            if cut and layer.index == self.spec.last_kept and batch.tokens > batch.rows:
                q, residual, step = q[batch.ends], residual[batch.ends], step.last()
            x = self._attend_and_feed(layer, q, residual, step)
            if tap is not None and layer.index in tap.layers:
                here = residual.clone() if x is None else residual + x  # the next norm writes into the residual
                shown.append(here if len(here) == batch.rows else here[batch.ends])
            if batch.observer is not None and layer.index in batch.observer.layers:
                batch.observer.layer_written(layer.index)
        if tap is not None:
            tap.states = shown
        if pipeline is not None:
            pipeline.send(residual if x is None else residual + x)
            if pipeline.rank:
                return residual  # only the first stage goes on with what the last one has made
            x, residual = None, pipeline.receive(self._hidden(batch.rows if last else batch.tokens))
        hidden = stages.norm(self.final_norm, x, residual)
        if self.context is not None and not last:
            return whole_step(hidden, batch.context, self.context)
        return hidden[batch.ends] if last and self.spec.encoder else hidden

    def _attend_and_feed(
        self, layer: Layer, q: torch.Tensor, residual: torch.Tensor, step: Step
    ) -> torch.Tensor | None:
        x = self._mixed_and_fed(layer, q, residual, step)
        if layer.tail is None:
            return x
        if x is not None:
            residual += x
        layer.tail(residual, step.inputs, self.stages.ops)
        return None

    def _mixed_and_fed(self, layer: Layer, q: torch.Tensor, residual: torch.Tensor, step: Step) -> torch.Tensor | None:
        stages = self.stages
        if layer.feed is None:
            return stages.attend(layer.mixer, q, residual, step)
        if not layer.parallel:
            return stages.feed(layer.feed, stages.attend(layer.mixer, q, residual, step), residual, step)
        fed = stages.feed(layer.feed, None, residual, step)
        mixed = stages.attend(layer.mixer, q, residual, step)
        return mixed if fed is None else fed if mixed is None else fed + mixed

    def shallow(self, input_ids: torch.Tensor, batch: Batch, kv: KVViews, layer: int) -> None:
        """Only K and V of the first layers, up to those of `layer`, go to their pages."""
        stages = self.stages
        residual, step = self._begin(input_ids, batch, kv)
        x: torch.Tensor | None = None
        for whole in self.layers[:layer]:
            x = self._attend_and_feed(whole, stages.qkv(whole.mixer, x, residual, step), residual, step)
        stages.qkv(self.layers[layer].mixer, x, residual, step)

    def _begin(self, input_ids: torch.Tensor, batch: Batch, kv: KVViews) -> tuple[torch.Tensor, Step]:
        """Embeddings [tokens, hidden], and what the layers share."""
        ops = self.stages.ops
        if self.pipeline is not None and self.pipeline.rank:
            return self.pipeline.receive(self._hidden(batch.tokens)), self._step(batch, kv)
        types, vocabulary = None, self.spec.vocab_size
        if self.token_types is not None:
            types, input_ids = input_ids.div(vocabulary, rounding_mode="floor"), input_ids.remainder(vocabulary)
        residual = self._embedded(input_ids)
        if self._embedding_scale != 1.0:
            residual *= self._embedding_scale
        if self.positions is not None:
            residual += ops.take(self.positions.weight, batch.positions + self.spec.position_offset)
        if self.token_types is not None and types is not None:
            residual += ops.take(self.token_types.weight, types)
        step = self._step(batch, kv)
        step.inputs = None if self.layer_inputs is None else self.layer_inputs(input_ids, residual, ops)
        return residual, step

    def _hidden(self, rows: int) -> torch.Tensor:
        return torch.empty(rows, self.spec.hidden, device=self.device, dtype=self.dtype)

    def _embedded(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.ranks is None:
            return self.stages.ops.take(self.embed.weight, input_ids)
        rows = self.embed.weight.shape[0]
        own = input_ids - self.ranks.rank * rows
        here = (own >= 0) & (own < rows)
        return self.ranks.reduce(self.stages.ops.take(self.embed.weight, own.clamp(0, rows - 1)) * here[:, None])

    def _step(self, batch: Batch, kv: KVViews) -> Step:
        rope_tables = self.stages.ops.rope_tables
        tables = {kind: rope_tables(batch.positions, *self._ropes[kind], self.dtype) for kind in self._rotated}
        return Step(batch, kv, tables)

    def through_layers(self, residual: torch.Tensor, batch: Batch, kv: KVViews) -> torch.Tensor:
        """Hidden states [tokens, hidden] before the first layer (overwritten) → behind the last, not normed."""
        step = self._step(batch, kv)
        x: torch.Tensor | None = None
        for layer in self.layers:
            x = self._attend_and_feed(layer, self.stages.qkv(layer.mixer, x, residual, step), residual, step)
        return residual if x is None else residual + x

    def embeddings(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of token ids [...], as its table has them: [..., hidden]"""
        return self.embed.weight[tokens]

    def sketch(self) -> Model:
        """With one layer of each kind, and the last: launches all that the whole does, and computes nothing of use."""
        kept = {*self.spec.layer_kinds, self.spec.last_kept, self.layers[-1].index}
        made = copy(self)
        made.layers = [layer for layer in self.layers if layer.index in kept]
        return made

    def prefix_heads(self, layout: KVLayout) -> int | None:
        """Query heads of a KV head, where rows with a common prefix are attended together over it; else None."""
        alike = len(set(self.spec.mixer_kinds)) == 1 and layout.groups[0].window is None
        if not alike or self.spec.recurrent or self.spec.encoder or self.context is not None:
            return None
        attention = self.spec.attention
        return attention.heads // attention.kv_heads if self.stages.backends[0].shares else None

    def prepared_lengths(self, longest: int) -> list[int]:
        """Lengths of prompts that attention prepares for when it first meets them."""
        found = [each.lengths(longest) for each in self.stages.backends.values() if isinstance(each, CudnnPrefill)]
        return sorted({length for lengths in found for length in lengths})

    def attention(self, batch: Batch, kv: KVViews) -> None:
        """Only attention, by queries of zeros: it takes longest to compile, and waits for nothing before it here."""
        step = Step(batch, kv, {})
        for mixer in (m for layer in self.layers if isinstance(m := layer.mixer, AttendingBlock)):
            shape = (batch.tokens, mixer.attention.heads, mixer.attention.head_dim)
            self.stages.attention(mixer, torch.zeros(shape, device=self.device, dtype=self.dtype), step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden] → logits [rows, vocabulary], in the dtype the head computes in."""
        logits, spec = self.stages.head(self.head, hidden), self.spec
        if self.ranks is not None:
            logits = self.ranks.gather(logits)[:, : spec.vocab_size]
        if spec.logit_scale != 1.0:
            logits = logits * spec.logit_scale
        if spec.logit_softcap is not None:
            logits = (logits / spec.logit_softcap).tanh_().mul_(spec.logit_softcap)
        return logits
