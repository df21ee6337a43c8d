"""The stages a forward pass is made of, and how plain operations make them.

    [ qkv ─► attend ─► feed ] x layers ─► norm ─► head       each begins with its norm, which first adds what came
                                                             before it to `residual`, in place

A recurrent mixer does its work in the place of qkv, so that only its last product is left to attend.

A stage hands on `x`, which is still to be added to the residual, or None if it has added it itself. A faster
implementation claims stages by subclassing: whatever it does not override stays composed of QuantScheme,
AttentionBackend and Ops. Refuses to know: how many layers there are, what tokens mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from quire.kernels.attention_backend import AttentionBackend, Batch
from quire.kernels.attention_mass import AttentionMassRows
from quire.kernels.backend_choice import choose_backend, choose_lora, choose_ops
from quire.kernels.eager.row_attention import attend_rows, plan_rows
from quire.kernels.kivi_attention import KiviRows, write_kivi
from quire.kernels.kv_views import KVViews
from quire.kernels.op_signatures import Ops
from quire.kernels.sparse_attention import SparseRows
from quire.model.blocks.attention import AttentionBlock, attention_spec
from quire.model.blocks.dense import DenseBlock
from quire.model.blocks.experts import ExpertsBlock
from quire.model.blocks.gated_delta import GatedDeltaBlock
from quire.model.blocks.latent import LatentBlock
from quire.model.blocks.linear import Linear
from quire.model.blocks.mamba2 import Mamba2Block
from quire.model.blocks.norms import Norm
from quire.model.blocks.short_conv import ShortConvBlock
from quire.model.decoder_spec import DecoderSpec
from quire.model.quantization.scheme import QuantScheme
from quire.model.ranks import Ranks

AttendingBlock = AttentionBlock | LatentBlock
RecurrentBlock = GatedDeltaBlock | Mamba2Block | ShortConvBlock
MixerBlock = AttendingBlock | RecurrentBlock


@dataclass
class Step:
    """What all layers share in one forward pass."""

    batch: Batch
    kv: KVViews
    rope: dict[int, tuple[torch.Tensor, torch.Tensor]]  # cos and sin, by kind of rotation
    plans: dict[int, Any] = field(default_factory=dict)  # by kind of attention
    inputs: torch.Tensor | None = None  # per-layer embeddings, [tokens, layers, width]
    segments: Any = None  # tokens by their adapters, once a layer has asked
    computed: dict[int, torch.Tensor] = field(default_factory=dict)  # K and V of this step, by layer, not in pages yet

    def last(self) -> Step:
        """Of each row's last token alone."""
        ends = self.batch.ends
        rope = {kind: (cos[ends], sin[ends]) for kind, (cos, sin) in self.rope.items()}
        inputs = None if self.inputs is None else self.inputs[ends]
        return Step(self.batch.last(), self.kv, rope, inputs=inputs, computed=self.computed)


def adapts(linear: Linear, step: Step) -> bool:
    """Whether a step has tokens of adapters, and the matrix has updates of any."""
    return linear.lora is not None and linear.lora.used and step.batch.adapters is not None


class Stages:
    invariant = False  # whether a row's bits are the same in any batch
    rotates_all = False  # whether queries and keys of layers that know no positions are rotated too, by nothing
    kv_kinds: tuple[str, ...] = ("int8", "fp8", "int4", "kivi4", "kivi2")  # of pages, beside the model's own type

    def __init__(
        self,
        spec: DecoderSpec,
        device: torch.device,
        *,
        plain: bool = False,
        ranks: Ranks | None = None,
    ):
        """`plain`: torch's own operations wherever it runs; what faster ones are checked against. `ranks`: over which
        row-parallel products are added up, before the residual."""
        self.ops: Ops = choose_ops(device, plain=plain)
        self.lora = choose_lora(device, plain=plain)
        self.backends: dict[int, AttentionBackend] = {}  # by kind of attention
        self.reasons: list[str] = []  # what was chosen and why, for people
        paged = [layer for layer, mixer in spec.attending.items() if not mixer.bidirectional]
        if len(paged) < len(spec.attending):
            self.reasons.append("attention: rows whole, both ways, by torch's own")
        for kind in sorted({spec.mixer_kinds[layer] for layer in paged}):
            chosen = choose_backend(attention_spec(spec, kind), device, plain=plain, invariant=self.invariant)
            self.backends[kind] = chosen[0]
            self.reasons += chosen[1]
        self.ranks = ranks
        self._residual_scale = spec.residual_scale
        self._plain_exit = ranks is None and spec.residual_scale == 1.0  # only a norm may come before the residual

    def norm(self, norm: Norm | None, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """residual += x (if there is an x yet), then its norm; without a norm, itself."""
        if norm is None:
            return residual if x is None else residual.add_(x)
        if norm.centred:
            added = residual if x is None else residual.add_(x)
            normed = self.ops.layer_norm(added, norm.weight, norm.bias, norm.eps)
            return residual.copy_(normed) if norm.replaces else normed
        if x is None:
            return self.ops.rms_norm(residual, norm.weight, norm.eps)
        return self.ops.add_rms_norm(x, residual, norm.weight, norm.eps)

    def qkv(self, block: MixerBlock, x: torch.Tensor | None, residual: torch.Tensor, step: Step) -> torch.Tensor:
        """Rotated queries [tokens, heads, dim], with gates behind each if there are any; keys and values go to their
        pages, or, where attention is bidirectional, along with them as more heads. Of a recurrent mixer, what is left
        to be multiplied: [tokens, width]."""
        if isinstance(block, RecurrentBlock):
            return block.mix(self.norm(block.norm, x, residual), step.kv.states[block.index], step.batch.states)
        if isinstance(block, LatentBlock):
            q, k = block.queries_and_keys(self.norm(block.norm, x, residual), step.rope[block.rope], self.ops)
            self.write_kv(block, k, k, step)
            return q
        heads, kv_heads, dim = block.attention.heads, block.attention.kv_heads, block.attention.head_dim
        flat = self.product(block.qkv, self.norm(block.norm, x, residual), step)
        gates = None
        if block.gated:
            q, gates, kv_flat = flat.split((heads * dim, heads * dim, block.kv_parts * kv_heads * dim), dim=1)
            flat = torch.cat((q, kv_flat), dim=1)
        if block.norms_all_heads:
            self.norm_all_heads(block, flat)
        qkv = flat.unflatten(1, (-1, dim))
        qk, v = qkv[:, : heads + kv_heads], qkv[:, -kv_heads:]
        if not block.norms_all_heads:
            sides = ((qk[:, :heads], block.q_norm), (qk[:, heads:], block.k_norm))
            normed = [self.ops.rms_norm(side, norm.weight, norm.eps) for side, norm in sides if norm is not None]
            qk = torch.cat(normed, dim=1) if normed else qk
        if block.rotates:
            qk = self.ops.rope(qk, *step.rope[block.rope])
        if block.bidirectional:
            return torch.cat((qk, v), dim=1)
        if block.kv_parts:
            v = v if block.v_norm is None else self.ops.rms_norm(v, block.v_norm.weight, block.v_norm.eps)
            self.write_kv(block, qk[:, heads:], v, step)
        q = self.scale_queries(block, qk[:, :heads], step)
        return q if gates is None else torch.cat((q, gates.unflatten(1, (heads, dim))), dim=-1)

    def write_kv(self, block: AttendingBlock, k: torch.Tensor, v: torch.Tensor, step: Step) -> None:
        """K and V [tokens, kv_heads, dim] go to their pages, before any row attends."""
        kv = step.kv.layers[block.index]
        if kv.residual is None:
            self.ops.write_kv(k, v, kv, step.batch.groups[kv.group].kv_slots)
        else:
            write_kivi(kv, k, v, step.batch)

    def scale_queries(self, block: AttentionBlock, q: torch.Tensor, step: Step) -> torch.Tensor:
        if (scaling := block.query_scaling) is None:
            return q
        steps = (step.batch.positions + scaling.offset).div(scaling.period, rounding_mode="floor")
        return q * (1 + scaling.weight * torch.log1p(steps))[:, None, None].to(q.dtype)

    def norm_all_heads(self, block: AttentionBlock, qkv: torch.Tensor) -> None:
        """Queries and keys [tokens, heads * dim] normed as wholes, in place."""
        q, k, _ = qkv.split(block.qkv.parts, dim=1)
        assert block.q_norm is not None and block.k_norm is not None
        sides = ((q, block.q_norm), (k, block.k_norm))
        if self.ranks is None:
            for side, norm in sides:
                side.copy_(self.ops.rms_norm(side, norm.weight, norm.eps))
            return
        own = torch.stack([side.float().pow(2).mean(1) for side, _ in sides], dim=1)
        squares = self.ranks.reduce(own) / self.ranks.size  # every rank has as many heads
        for (side, norm), square in zip(sides, squares.split(1, dim=1), strict=True):
            side.copy_(side.float() * torch.rsqrt(square + norm.eps) * norm.weight.float())

    def attend(self, block: MixerBlock, q: torch.Tensor, residual: torch.Tensor, step: Step) -> torch.Tensor | None:
        """Attention over pages and the output projection, [tokens, hidden]."""
        if isinstance(block, RecurrentBlock):
            out = self.product(block.o, q, step)
        elif isinstance(block, LatentBlock):
            out = self.product(block.o, block.values(self.attention(block, q, step)), step)
        elif block.gated:
            q, gates = q.chunk(2, dim=-1)
            mixed = (self.attention(block, q.contiguous(), step) * gates.sigmoid()).flatten(1)
            out = self.product(block.o, mixed, step)
        else:
            out = self.product(block.o, self.attention(block, q, step).flatten(1), step)
        return out if block.post_norm is None and self._plain_exit else self.leave(block.post_norm, out)

    def attention(self, block: AttendingBlock, q: torch.Tensor, step: Step) -> torch.Tensor:
        """[tokens, heads, dim]; the backend plans once a step for all layers with such attention."""
        if isinstance(block, AttentionBlock) and block.bidirectional:
            if block.kind not in step.plans:
                step.plans[block.kind] = plan_rows(step.batch.counts, q.device)
            return attend_rows(block.attention, q, step.plans[block.kind])
        kv = step.kv.layers[block.kept_by]
        group = step.batch.groups[kv.group]
        backend = self.backends[block.kind]
        if step.batch.asks:
            backend = AttentionMassRows(backend)
        if kv.residual is not None:
            backend = KiviRows(backend)
        plan = block.kind
        if step.batch.sparse is not None and isinstance(block, AttentionBlock) and block.sparse:
            backend, plan = SparseRows(backend, step.kv.layout.groups[kv.group].layers.index(block.index)), -1 - plan
        if plan not in step.plans:
            stored = replace(block.attention, kv_itemsize=kv.k_pages.element_size())
            step.plans[plan] = backend.plan(step.batch, group, stored)
        return backend.forward(block.attention, q, kv, step.batch, group, step.plans[plan])

    def feed(
        self, block: DenseBlock | ExpertsBlock, x: torch.Tensor | None, residual: torch.Tensor, step: Step
    ) -> torch.Tensor | None:
        normed = self.norm(block.norm, x, residual)
        if isinstance(block, ExpertsBlock):
            out = block.forward(normed, self.ops, residual, None if self.ranks is None else self.ranks.reduce)
        else:
            act = self.ops.act_and_mul if block.gated else self.ops.act
            out = self.product(block.down, act(self.product(block.up, normed, step), block.activation), step)
        straight = block.post_norm is None and self._plain_exit
        return out if straight else self.leave(block.post_norm, out, whole=block.adds_up)

    def product(self, linear: Linear, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x [tokens, columns] by a matrix, and what each token's adapter adds to it."""
        return self.adapted(linear, x, linear(x), step)

    def adapted(self, linear: Linear, x: torch.Tensor, out: torch.Tensor, step: Step) -> torch.Tensor:
        """`out`, the product of x and a matrix, with what each token's adapter adds to it, in place."""
        if adapts(linear, step):
            lora, adapters = linear.lora, step.batch.adapters
            assert lora is not None and adapters is not None
            if step.segments is None:
                step.segments = self.lora.segments(adapters, lora.a.shape[0])
            self.lora.add_lora(out, x, lora.a, lora.b, lora.parts, step.segments)
        return out

    def leave(self, post_norm: Norm | None, out: torch.Tensor, *, whole: bool = False) -> torch.Tensor:
        """What comes between a block's last product and the residual: ranks add up, unless it is `whole`, the norm
        behind it, the scale of all that is added."""
        if self.ranks is not None and not whole:
            out = self.ranks.reduce(out)
        if post_norm is not None:
            out = self.norm(post_norm, None, out)
        return out if self._residual_scale == 1.0 else out * self._residual_scale

    def describe(self, scheme: QuantScheme) -> list[str]:
        """What was chosen and why, for people, where layers' weights are kept by this scheme."""
        return self.reasons

    def head(self, head: Linear, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, [rows, vocabulary]."""
        return head(hidden)
