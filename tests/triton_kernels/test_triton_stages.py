"""The MLP of a layer through the fused stages: with gate and up joined or apart, in 32 and in 8 bits, what plain torch
makes of it."""

from types import SimpleNamespace

import pytest
import torch

from quire.kernels.triton import configs
from quire.kernels.triton.configs import Matmul
from quire.model.blocks.fused import FusedStages
from quire.model.blocks.stages import Stages
from quire.model.families.llama import LlamaFamily
from quire.model.quantization.fp8 import Fp8Scheme
from quire.model.quantization.scheme import DenseScheme, Linear, Plain

CPU = torch.device("cpu")
HIDDEN, FFN = 64, 96
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def layer(scheme, dtype):
    made = SimpleNamespace(post_norm=Plain((HIDDEN,), bias=False, device=CPU, dtype=dtype))
    made.post_norm.weight.normal_()
    for name, columns, parts in (("up", HIDDEN, (FFN, FFN)), ("down", FFN, (HIDDEN,))):
        linear = Linear(columns, parts, bias=False, scheme=scheme, device=CPU, dtype=dtype)
        scheme.put(linear.state, 0, torch.randn(sum(parts), columns).to(dtype) * 0.1)
        setattr(made, name, linear)
    return made


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("eight", [True, False])
def test_mlp(joined, eight, monkeypatch):
    torch.manual_seed(5)
    dtype = torch.bfloat16 if eight else torch.float32
    monkeypatch.setattr(configs, "GATED_OUTPUTS", 2 * FFN)
    table = {1 if eight else 4: [(99, Matmul(64, 32, 4, 2, rows=16))]}
    monkeypatch.setattr(configs, "GATED_MATMUL", table if joined else {})
    spec = LlamaFamily().spec(CONFIG)
    one = layer(Fp8Scheme() if eight else DenseScheme(), dtype)
    x, residual = (torch.randn(9, HIDDEN).to(dtype) for _ in range(2))
    wanted = residual.clone()
    wanted += Stages(spec, CPU, plain=True).mlp(one, x.clone(), wanted)
    launched = []
    stages = FusedStages(spec, CPU)
    kernel = stages._gemm.gated_matmul
    monkeypatch.setattr(stages._gemm, "gated_matmul", lambda *a, **k: launched.append(1) or kernel(*a, **k))
    rest = stages.mlp(one, x.clone(), residual)
    got = residual if rest is None else residual + rest
    assert len(launched) == joined
    assert (got - wanted).norm() < (0.04 if eight else 1e-5) * wanted.norm()
