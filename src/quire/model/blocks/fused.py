"""Stages on a GPU: Triton kernels that join what plain torch does in several launches.

    qkv:   add + norm ─► product ─► norm heads, rotate, write K and V       attend:  attention ─► product (+ residual)
    feed:  add + norm ─► product ─► SiLU * up ─► product (+ residual)

Products take norm, gate and residual along as their scheme can (`quantization/`). What a layer has that these kernels
do not know runs as the composed stage has it, for just that part, and `reasons` says so. Refuses to know: graphs, how
weights are kept.
"""

from __future__ import annotations

from collections import Counter

import torch

from quire.kernels.triton import why_not
from quire.model.blocks.attention import AttentionBlock
from quire.model.blocks.context_stages import ContextStages
from quire.model.blocks.dense import DenseBlock
from quire.model.blocks.experts import ExpertsBlock
from quire.model.blocks.linear import Linear
from quire.model.blocks.norms import Norm
from quire.model.blocks.stages import MixerBlock, Stages, Step, adapts
from quire.model.decoder_spec import Attention, DecoderSpec, Experts, Latent, LayerSpec
from quire.model.quantization.scheme import QuantScheme
from quire.model.ranks import Ranks
from quire.types.errors import ConfigError


def choose_stages(
    spec: DecoderSpec, device: torch.device, *, invariant: bool = False, ranks: Ranks | None = None
) -> Stages:
    """Fused stages where they can run, plain ones elsewhere, those of a context-parallel rank for such; `reasons` says
    which. `invariant`: a row's bits may not depend on what runs beside it."""
    if ranks is not None and ranks.context:
        return ContextStages(spec, device, ranks)
    refusal = why_not(device)
    if invariant and (varying := batch_dependent(spec)):
        raise ConfigError(f"invariant results are not to be had with {varying}: their bits depend on the batch")
    if refusal is None:
        return InvariantStages(spec, device) if invariant else FusedStages(spec, device, ranks)
    if invariant:
        raise ConfigError(f"invariant results come from the Triton kernels, which cannot run here: {refusal}")
    stages = Stages(spec, device, ranks=ranks)
    stages.reasons.append(f"stages: plain torch, not fused: {refusal}")
    return stages


def batch_dependent(spec: DecoderSpec) -> str | None:
    """What of a decoder has no products of one tiling for any batch."""
    if any(isinstance(layer.feed, Experts) for layer in spec.layers):
        return "experts"
    if spec.recurrent:
        return "recurrent layers"
    if spec.encoder:
        return "an encoder"
    return "latent attention" if any(isinstance(layer.mixer, Latent) for layer in spec.layers) else None


def composed_parts(layer: LayerSpec) -> list[str]:
    """What of a layer has kernels of its own, where others have it fused."""
    parts = []
    if layer.norms.kind != "rms":
        parts.append("LayerNorms")
    if layer.norms.after:
        parts.append("norms after mixer and feed, between product and residual")
    if isinstance(layer.mixer, Latent):
        parts.append("latent attention")
    elif not isinstance(layer.mixer, Attention):
        parts.append(f"{type(layer.mixer).__name__} layers, in plain torch")
    else:
        if layer.mixer.gate:
            parts.append("attention with an output gate")
        if layer.mixer.qk_norm == "all":
            parts.append("norms of queries and keys over all heads")
        if layer.mixer.kv_parts < 2 or layer.mixer.v_norm:
            parts.append("values that are normed, are keys, or are another layer's")
        if layer.mixer.query_scaling is not None:
            parts.append("queries scaled by position")
    if layer.parallel is not None:
        parts.append("attention and MLP beside each other")
    if isinstance(layer.feed, Experts):
        if layer.feed.activation not in ("silu", "swiglu_oai") or not layer.feed.gated:
            parts.append(f"experts with {layer.feed.activation}")
    elif layer.feed is not None and not layer.feed.swiglu:
        parts.append(f"{layer.feed.activation} {'of the gate' if layer.feed.gated else 'without a gate'}")
    return parts


class FusedStages(Stages):
    rotates_all = True
    kv_kinds = ("float8_e4m3fn", "int8", "fp8")

    def __init__(self, spec: DecoderSpec, device: torch.device, ranks: Ranks | None = None):
        super().__init__(spec, device, ranks=ranks)
        from quire.kernels.triton import rope_kernel as rope

        self._rope_and_write = rope.rope_and_write
        self.reasons.append(f"stages: {self._how(device)}")
        apart = Counter(part for layer in spec.layers for part in composed_parts(layer))
        self.reasons += [f"not fused: {part} ({count} of {len(spec.layers)} layers)" for part, count in apart.items()]
        if spec.residual_scale != 1.0:
            self.reasons.append("not fused: the scale of what is added to the residual stream")

    def _how(self, device: torch.device) -> str:
        return "Triton kernels between products"

    def qkv(self, block: MixerBlock, x: torch.Tensor | None, residual: torch.Tensor, step: Step) -> torch.Tensor:
        if not isinstance(block, AttentionBlock) or block.gated or block.kv_parts < 2 or block.v_norm is not None:
            return super().qkv(block, x, residual, step)
        if block.bidirectional:
            return super().qkv(block, x, residual, step)
        norm, q_norm, k_norm = block.norm, block.q_norm, block.k_norm
        if norm is not None and not norm.centred and not adapts(block.qkv, step):
            fused = block.qkv.scheme.product(block.qkv, x, residual, norm=norm)
            assert fused is not None
            qkv = fused
        else:
            qkv = self.product(block.qkv, self.norm(norm, x, residual), step)
        if block.norms_all_heads:
            self.norm_all_heads(block, qkv)
            q_norm = k_norm = None
        kv = step.kv.layers[block.index]
        q = self._rope_and_write(
            qkv,
            block.attention.heads,
            *step.rope[block.rope],
            kv,
            step.batch.groups[kv.group].kv_slots,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            eps=0.0 if q_norm is None else q_norm.eps,
        )
        return self.scale_queries(block, q, step)

    def attend(self, block: MixerBlock, q: torch.Tensor, residual: torch.Tensor, step: Step) -> torch.Tensor | None:
        if not isinstance(block, AttentionBlock) or block.gated:
            return super().attend(block, q, residual, step)
        mixed = self.attention(block, q, step).flatten(1)
        return self._exit(block.o, block.post_norm, mixed, residual, step)

    def _exit(
        self, linear: Linear, post_norm: Norm | None, x: torch.Tensor, residual: torch.Tensor, step: Step
    ) -> torch.Tensor | None:
        """A block's last product, added to the residual with it where nothing comes between them."""
        straight = post_norm is None and self._plain_exit
        if straight and not adapts(linear, step):
            return linear.scheme.product(linear, x, residual)
        out = self.product(linear, x, step)
        return out if straight else self.leave(post_norm, out)

    def product(self, linear: Linear, x: torch.Tensor, step: Step) -> torch.Tensor:
        out = linear.scheme.product(linear, x)
        assert out is not None
        return self.adapted(linear, x, out, step)

    def feed(
        self, block: DenseBlock | ExpertsBlock, x: torch.Tensor | None, residual: torch.Tensor, step: Step
    ) -> torch.Tensor | None:
        if isinstance(block, ExpertsBlock):
            plain = block.spec.own_norms or block.spec.held is not None
            if plain or block.spec.activation not in ("silu", "swiglu_oai") or not block.spec.gated:
                return super().feed(block, x, residual, step)
            mixed = block.fused(self.norm(block.norm, x, residual), self.ops)
            return mixed if block.post_norm is None and self._plain_exit else self.leave(block.post_norm, mixed)
        norm, joined = block.norm, block.swiglu and not adapts(block.up, step) and not adapts(block.down, step)
        if norm is not None and not norm.centred and not adapts(block.up, step):
            fused = block.up.scheme.product(block.up, x, residual, norm=norm, gate=joined)
            assert fused is not None
            up = fused
        else:
            up = self.product(block.up, self.norm(norm, x, residual), step)
        if not joined:  # else in the product, or in the next one
            up = (self.ops.act_and_mul if block.gated else self.ops.act)(up, block.activation)
        return self._exit(block.down, block.post_norm, up, residual, step)

    def describe(self, scheme: QuantScheme) -> list[str]:
        along = f"{', '.join(scheme.fuses)} fused where that is faster" if scheme.fuses else "nothing fused with them"
        return [*self.reasons, f"products: {scheme.name}, {along}"]

    def head(self, head: Linear, hidden: torch.Tensor) -> torch.Tensor:
        logits = head.scheme.product(head, hidden)
        assert logits is not None
        return logits


class InvariantStages(FusedStages):
    """Every product by one tiling of one kernel (the schemes' own), every attention by one split of the keys."""

    invariant = True

    def _how(self, device: torch.device) -> str:
        return "Triton kernels of one tiling for any batch: slower, the same bits in all of them"
