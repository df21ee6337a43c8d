"""Experts by Triton kernels, interpreted, against the plain block."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.eager import torch_ops
from quire.model.decoder import Model
from quire.model.decoder_spec import Attention, DecoderSpec, Experts, LayerSpec, Router
from quire.model.loading.load import fill_random

ROUTERS = {
    "softmax": Router(),
    "plain weights": Router(normalised=False, scale=1.3),
    "sigmoid": Router(score="sigmoid", correction=True, scale=2.5),
    "weighed inputs": Router(score="sigmoid", normalised=False, weighs_input=True),
    "groups": Router(score="sigmoid", correction=True, groups=2, top_groups=1, group_score="top2"),
}


def block(router: Router, **facts):
    experts = Experts(count=6, top_k=3, intermediate=24, router=router, **facts)
    attention = Attention(heads=2, kv_heads=1, head_dim=16, scale=1.0)
    spec = DecoderSpec("test", 32, 40, 64, (LayerSpec(attention, experts),))
    model = Model(spec, device=torch.device("cpu"), dtype=torch.float32)
    fill_random(model, 0)
    made = model.layers[0].feed
    generator = torch.Generator().manual_seed(1)
    for module in made.modules().values():
        for tensor in [] if module is None else module.tensors().values():
            tensor.normal_(0, 0.3, generator=generator)
    return made


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("router", ROUTERS)
def test_routers(router, tokens):
    made = block(ROUTERS[router])
    x = torch.randn(tokens, 40, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(made.fused(x, torch_ops), made.forward(x, torch_ops, x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "facts",
    [{"bias": True, "activation": "swiglu_oai"}, {"shared": 16, "shared_gate": True}, {"shared": 8}],
    ids=["biased", "gated shared", "shared"],
)
def test_experts_of_other_kinds(facts):
    made = block(Router(bias=bool(facts.get("bias"))), **facts)
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(2)) * 4
    torch.testing.assert_close(made.fused(x, torch_ops), made.forward(x, torch_ops, x), atol=1e-3, rtol=1e-4)
