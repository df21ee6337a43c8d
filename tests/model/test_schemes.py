"""Quantization schemes: how their tensors are cut for tensor-parallel ranks, and where ranks add up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from quire.model.blocks.dense import DenseBlock
from quire.model.blocks.linear import Linear
from quire.model.blocks.norms import Norm
from quire.model.blocks.stages import Stages
from quire.model.decoder import Model
from quire.model.decoder_spec import Attention, DecoderSpec, Dense, Experts, LayerSpec, Norms
from quire.model.loading.load import put_rows
from quire.model.quantization.dense_scheme import DenseScheme
from quire.model.quantization.fp8 import Fp8Scheme
from quire.model.sharding import Shard
from quire.types.errors import ConfigError

CPU = torch.device("cpu")
NO_ADAPTERS = SimpleNamespace(batch=SimpleNamespace(adapters=None))
HIDDEN, FFN, RANKS = 32, 48, 2
ATTENTION = Attention(heads=2, kv_heads=2, head_dim=16, scale=0.25)


def spec_of(**more) -> DecoderSpec:
    layers = (LayerSpec(ATTENTION, Dense(FFN), Norms(after=more.pop("after", False))),)
    return DecoderSpec("test", vocab_size=8, hidden=HIDDEN, max_position=8, layers=layers, **more)


def linear(columns: int, parts: tuple[int, ...], bias: bool = False, scheme=None) -> Linear:
    made = Linear(columns, parts, bias=bias, scheme=scheme or DenseScheme(), device=CPU, dtype=torch.float32)
    made.scheme.put(made.state, 0, torch.randn(sum(parts), columns) * 0.2)
    return made


def cut(whole: Linear, parallel: str, rank: int) -> Linear:
    """A rank's piece; each of the stacked matrices is cut for itself."""
    columns = whole.columns // (RANKS if parallel == "row" else 1)
    parts = tuple(n // (RANKS if parallel == "column" else 1) for n in whole.parts)
    piece = linear(columns, parts, scheme=whole.scheme)
    rows = torch.cat([part.chunk(RANKS)[rank] for part in torch.arange(sum(whole.parts)).split(whole.parts)])
    shard = Shard(rows) if parallel == "column" else Shard(columns=torch.arange(whole.columns).chunk(RANKS)[rank])
    put_rows(piece, shard, "weight", 0, dense(whole))
    return piece


def dense(made: Linear) -> torch.Tensor:
    scale = made.state.get("scale")
    return made.state["weight"].float() * (1.0 if scale is None else scale[:, None])


@pytest.mark.parametrize("scheme", [DenseScheme(), Fp8Scheme()], ids=lambda scheme: scheme.name)
def test_ranks_have_all_of_a_matrix_between_them(scheme):
    whole = linear(HIDDEN, (FFN, FFN), scheme=scheme)
    columns, rows = ([dense(cut(whole, how, rank)) for rank in range(RANKS)] for how in ("column", "row"))
    gate, up = ([piece.chunk(2)[i] for piece in columns] for i in range(2))
    error = 0.07 if scheme.name == "fp8" else 0.0  # three bits behind the point, and scales of parts of rows
    torch.testing.assert_close(torch.cat((*gate, *up)), dense(whole), rtol=error, atol=error / 100)
    torch.testing.assert_close(torch.cat(rows, dim=1), dense(whole), rtol=error, atol=error / 100)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("residual_scale", [1.0, 0.5])
def test_ranks_add_up_before_anything_else(after, residual_scale):
    """Norms and scales come behind the sum."""
    torch.manual_seed(0)
    spec = spec_of(after=after, residual_scale=residual_scale)
    whole = DenseBlock.build(spec, 0, linear, lambda size, norms: Norm(size, norms, device=CPU, dtype=torch.float32))
    for norm in (whole.norm, whole.post_norm):
        if norm is not None:
            norm.weight.normal_()
    x, residual = torch.randn(2, 5, HIDDEN)
    wanted = Stages(spec, CPU).feed(whole, x, residual.clone(), NO_ADAPTERS)
    ranks = [
        DenseBlock(**vars(whole) | {"up": cut(whole.up, "column", rank), "down": cut(whole.down, "row", rank)})
        for rank in range(RANKS)
    ]
    seen: list[torch.Tensor] = []
    second = SimpleNamespace(reduce=lambda part: seen.append(part) or part)
    Stages(spec, CPU, ranks=second).feed(ranks[1], x, residual.clone(), NO_ADAPTERS)
    first = SimpleNamespace(reduce=lambda part: part + seen[0])
    got = Stages(spec, CPU, ranks=first).feed(ranks[0], x, residual.clone(), NO_ADAPTERS)
    torch.testing.assert_close(got, wanted)


def test_what_invariance_and_8_bits_do_not_reach_is_said():
    layer = LayerSpec(spec_of().layers[0].mixer, Experts(count=4, top_k=2, intermediate=8))
    spec = DecoderSpec("test", 8, HIDDEN, 8, (layer,))
    with pytest.raises(ConfigError, match="not to be had with experts"):
        Model(spec, device=CPU, dtype=torch.float32, invariant=True)
    made = Model(spec, device=torch.device("meta"), dtype=torch.bfloat16, scheme=Fp8Scheme())
    assert any(line.startswith("experts: in bfloat16") for line in made.describe())


def test_layers_may_differ_and_those_that_keep_the_same_share_pages():
    layer = spec_of().layers[0]
    other = LayerSpec(Attention(heads=4, kv_heads=2, head_dim=16, scale=0.1, window=3), Dense(8), Norms(after=True))
    spec = DecoderSpec("test", 8, HIDDEN, 8, (layer, other, layer))
    assert spec.mixer_kinds == spec.layer_kinds == [0, 1, 0]
    assert [group.layers for group in spec.kv_layout(page_size=4, dtype="float32").groups] == [(0, 2), (1,)]
    wide = LayerSpec(Attention(heads=2, kv_heads=2, head_dim=32, scale=1.0), Dense(8))
    layout = DecoderSpec("test", 8, HIDDEN, 8, (layer, wide)).kv_layout(page_size=4, dtype="float32")
    assert [(group.layers, group.kv_heads, group.head_dim) for group in layout.groups] == [((0,), 2, 16), ((1,), 2, 32)]
