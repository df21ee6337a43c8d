"""A model's blocks as the compiled program's structs: which of a block's tensors is what of a mixer or a feed.

Refuses to know: how the program runs, files.
"""

from __future__ import annotations

import torch

from quire.kernels.cpu import PackedMatrix, Store
from quire.kernels.cpu import weights as w
from quire.model.blocks.attention import AttentionBlock
from quire.model.blocks.dense import DenseBlock
from quire.model.blocks.experts import ExpertsBlock
from quire.model.blocks.gated_delta import GatedDeltaBlock
from quire.model.blocks.latent import LatentBlock
from quire.model.blocks.layer_inputs import LayerTail
from quire.model.blocks.linear import Linear
from quire.model.blocks.mamba2 import Mamba2Block
from quire.model.blocks.norms import Norm
from quire.model.blocks.recurrent import CausalConv
from quire.model.blocks.short_conv import ShortConvBlock
from quire.model.decoder import Layer, Model
from quire.model.loading.packed_weights import PackedTable
from quire.model.quantization.packed import PackedScheme
from quire.types.errors import ConfigError

PARALLEL = {None: w.IN_TURN, "one_norm": w.ONE_NORM, "own_norms": w.OWN_NORMS}


def program_weights(model: Model, isa: str | None) -> w.Decoder:
    """Of a model whose matrices are packed."""
    spec, inputs = model.spec, model.layer_inputs
    embed = _table(model.embed)
    rotations = {kind: at for at, kind in enumerate(model.ropes)}
    return w.Decoder(
        hidden=spec.hidden,
        embed=embed,
        head=embed if spec.tie_embeddings else _parts(model.head)[0].w,
        final_norm=_present(model.final_norm),
        rotation=[w.Rotation(frequencies, scale) for frequencies, scale in model.ropes.values()],
        layer=[_layer(model, layer, rotations, isa) for layer in model.layers],
        embedding_scale=spec.embedding_scale,
        residual_scale=spec.residual_scale,
        logit_scale=spec.logit_scale,
        logit_softcap=spec.logit_softcap or 0.0,
        positions=None if model.positions is None else model.positions.weight,
        position_offset=spec.position_offset,
        input_table=None if inputs is None else _table(inputs.table),
        input_product=None if inputs is None else _parts(inputs.product)[0].w,
        input_norm=None if inputs is None else _norm(inputs.norm),
        input_width=spec.layer_input,
    )


def _table(table: object) -> PackedMatrix:
    assert isinstance(table, PackedTable)
    return table.matrix


def _parts(linear: Linear) -> list[w.Linear]:
    """The matrices of a stack, each with its bias."""
    assert isinstance(linear.scheme, PackedScheme)
    biases = [None] * len(linear.parts) if linear.bias is None else linear.bias.split(linear.parts)
    return [w.Linear(matrix, bias) for matrix, bias in zip(linear.scheme.matrices, biases, strict=True)]


def _norm(norm: Norm | None) -> w.Norm | None:
    if norm is None:
        return None
    if norm.replaces:
        raise ConfigError("norms that take the place of the residual stream are not for the compiled decoder")
    return w.Norm(norm.weight, norm.bias, norm.eps, norm.centred)


def _present(norm: Norm | None) -> w.Norm:
    made = _norm(norm)
    assert made is not None
    return made


def _layer(model: Model, layer: Layer, rotations: dict[int, int], isa: str | None) -> w.Layer:
    spec, mixer, feed = model.spec.layers[layer.index], layer.mixer, layer.feed
    out = w.Layer(
        mixer_norm=_norm(mixer.norm),
        mixer_post_norm=_norm(mixer.post_norm),
        input=None if layer.tail is None else _layer_input(layer.tail),
        parallel=PARALLEL[spec.parallel],
    )
    if feed is not None:
        out.feed_norm, out.feed_post_norm = _norm(feed.norm), _norm(feed.post_norm)
    match mixer:
        case AttentionBlock():
            out.attention = _attention(mixer, rotations)
        case LatentBlock():
            out.latent = _latent(mixer, rotations, isa)
        case GatedDeltaBlock():
            out.delta = _gated_delta(mixer)
        case Mamba2Block():
            out.mamba = _mamba2(mixer)
        case ShortConvBlock():
            b, c, x = _parts(mixer.in_proj)
            out.conv = w.ShortConv(b, c, x, _parts(mixer.o)[0], _convolution(mixer.conv))
    match feed:
        case DenseBlock():
            out.mlp = _mlp(_parts(feed.up), _parts(feed.down)[0], feed.activation)
        case ExpertsBlock():
            out.experts = _experts(feed, model.spec.hidden)
    return out


def _attention(block: AttentionBlock, rotations: dict[int, int]) -> w.Attention:
    spec, scaling = block.attention, block.query_scaling
    q, *rest = _parts(block.qkv)
    gate = rest.pop(0) if block.gated else None
    return w.Attention(
        q=q,
        o=_parts(block.o)[0],
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        k=rest[0] if block.kv_parts else None,
        v=rest[1] if block.kv_parts > 1 else None,
        gate=gate,
        q_norm=_norm(block.q_norm),
        k_norm=_norm(block.k_norm),
        v_norm=_norm(block.v_norm),
        norms_all=block.norms_all_heads,
        rotation=rotations[block.rope] if block.rotates else -1,
        window=spec.window or 0,
        chunked=spec.chunked,
        softcap=spec.softcap or 0.0,
        sinks=None if block.sinks is None else block.sinks.weight,
        sparse=block.sparse,
        scaling_weight=0.0 if scaling is None else scaling.weight,
        scaling_period=0 if scaling is None else scaling.period,
        scaling_offset=0 if scaling is None else scaling.offset,
        kept_by=block.kept_by,
    )


def _latent(block: LatentBlock, rotations: dict[int, int], isa: str | None) -> w.Latent:
    spec = block.spec
    by_head = block.kv_up.state["weight"].unflatten(0, (spec.heads, -1))  # [heads, nope + value, rank]
    keys, values = by_head.split((spec.nope_dim, spec.value_dim), dim=1)
    latents, rotary = _parts(block.kv_down)
    return w.Latent(
        q_down=None if block.q_down is None else _parts(block.q_down)[0],
        q_up=_parts(block.q_up)[0],
        kv_down=latents,
        k_rotary=rotary,
        o=_parts(block.o)[0],
        k_up=_packed(keys.transpose(1, 2), isa),
        v_up=_packed(values, isa),
        q_norm=_norm(block.q_norm),
        kv_norm=_present(block.kv_norm),
        heads=spec.heads,
        rank=spec.kv_rank,
        rest=spec.nope_dim,
        rotary=spec.rope_dim,
        value_dim=spec.value_dim,
        rotation=rotations[block.rope],
        scale=block.attention.scale,
        kept_by=block.kept_by,
    )


def _packed(matrices: torch.Tensor, isa: str | None) -> list[PackedMatrix]:
    """Floats [matrices, rows, columns] in 8 bits."""
    count, rows, columns = matrices.shape
    store = Store(count * Store.needs(rows, columns, "F32", isa))
    packed = [PackedMatrix(store, rows, columns, "F32", isa) for _ in range(count)]
    for matrix, numbers in zip(packed, matrices, strict=True):
        matrix.fill(numbers.float().contiguous().view(torch.uint8))
    return packed


def _gated_delta(block: GatedDeltaBlock) -> w.GatedDelta:
    spec, norm = block.spec, block.head_norm
    q, k, v, z = _parts(block.qkvz)
    return w.GatedDelta(
        q=q,
        k=k,
        v=v,
        z=z,
        o=_parts(block.o)[0],
        ba=block.ba.state["weight"],
        decay=-block.a_log.weight.exp(),
        dt_bias=block.dt_bias.weight,
        conv=_convolution(block.conv),
        norm=w.GatedNorm(norm.weight, spec.values, spec.value_dim, norm.eps, gate_first=False),
        key_heads=spec.key_heads,
        value_heads=spec.value_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        tiled=spec.tiled,
    )


def _mamba2(block: Mamba2Block) -> w.Mamba2:
    spec, norm = block.spec, block.gate_norm
    least, most = spec.time_step_limit
    gate, xbc, dt = _parts(block.in_proj)
    return w.Mamba2(
        gate=gate,
        xbc=xbc,
        dt=dt,
        o=_parts(block.o)[0],
        decay=-block.a_log.weight.exp(),
        dt_bias=block.dt_bias.weight,
        d=block.d.weight,
        conv=_convolution(block.conv),
        norm=w.GatedNorm(norm.weight, spec.inner, spec.inner // spec.norm_groups, norm.eps, gate_first=True),
        heads=spec.heads,
        head_dim=spec.head_dim,
        groups=spec.groups,
        state_size=spec.state_size,
        dt_least=least,
        dt_most=most,
    )


def _convolution(conv: CausalConv) -> w.Convolution:
    return w.Convolution(conv.weight.t().contiguous(), conv.bias)


def _mlp(up: list[w.Linear], down: w.Linear, activation: str) -> w.Mlp:
    return w.Mlp(up[0] if len(up) > 1 else None, up[-1], down, w.ACTIVATIONS.index(activation))


def _experts(block: ExpertsBlock, hidden: int) -> w.Experts:
    spec, norms = block.spec, block.norms
    router, ups, downs = spec.router, _parts(block.up), _parts(block.down)
    each = len(ups) // len(downs)
    shared = None
    if block.shared_up is not None and block.shared_down is not None:
        shared = _mlp(_parts(block.shared_up), _parts(block.shared_down)[0], spec.activation)
    return w.Experts(
        router=w.Router(
            weight=block.router.state["weight"],
            bias=block.router.bias,
            correction=None if block.correction is None else block.correction.weight,
            scales=None if norms is None else norms.scales.weight,
            sigmoid=router.score == "sigmoid",
            normalised=router.normalised,
            weighs_input=router.weighs_input,
            groups=router.groups,
            top_groups=router.top_groups,
            best_two=router.group_score == "top2",
            logit_scale=1.0 if norms is None else hidden**-0.5,
            scale=router.scale,
        ),
        expert=[_mlp(ups[i * each : (i + 1) * each], down, spec.activation) for i, down in enumerate(downs)],
        shared=shared,
        shared_gate=None if block.shared_gate is None else block.shared_gate.state["weight"],
        top_k=spec.top_k,
        router_norm=None if norms is None else _norm(norms.router),
        norm=None if norms is None else _norm(norms.experts),
        post_norm=None if norms is None else _norm(norms.experts_post),
        shared_post_norm=None if norms is None else _norm(norms.shared_post),
    )


def _layer_input(tail: LayerTail) -> w.LayerInput:
    return w.LayerInput(
        gate=None if tail.gate is None else _parts(tail.gate)[0],
        up=None if tail.up is None else _parts(tail.up)[0],
        norm=_norm(tail.norm),
        activation=w.ACTIVATIONS.index(tail.activation),
        scale=1.0 if tail.scalar is None else tail.scalar.weight.item(),
    )
