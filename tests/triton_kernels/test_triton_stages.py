"""Layers through the fused stages: MLPs with gate and up joined or apart, in 32 and in 8 bits, and whole models, what
plain torch makes of them."""

from types import SimpleNamespace

import pytest
import torch

from quire.kernels import backend_choice as registry
from quire.kernels.batch_assembly import whole_sequence
from quire.kernels.triton import configs, gemm, paged_attention
from quire.kernels.triton.configs import Matmul
from quire.model import load_model
from quire.model.blocks import fused
from quire.model.blocks.dense import DenseBlock
from quire.model.blocks.fused import FusedStages
from quire.model.blocks.linear import Linear
from quire.model.blocks.norms import Norm
from quire.model.blocks.stages import Stages
from quire.model.families.llama import LlamaFamily
from quire.model.quantization.dense_scheme import DenseScheme
from quire.model.quantization.fp8 import Fp8Scheme

CPU = torch.device("cpu")
NO_ADAPTERS = SimpleNamespace(batch=SimpleNamespace(adapters=None))
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


def feed_of(spec, scheme, dtype):
    def linear(columns, parts, bias):
        made = Linear(columns, parts, bias=bias, scheme=scheme, device=CPU, dtype=dtype)
        scheme.put(made.state, 0, torch.randn(sum(parts), columns).to(dtype) * 0.1)
        return made

    made = DenseBlock.build(spec, 0, linear, lambda size, norms: Norm(size, norms, device=CPU, dtype=dtype))
    made.norm.weight.normal_()
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
    one = feed_of(spec, Fp8Scheme() if eight else DenseScheme(), dtype)
    x, residual = (torch.randn(9, HIDDEN).to(dtype) for _ in range(2))
    wanted = residual.clone()
    wanted += Stages(spec, CPU, plain=True).feed(one, x.clone(), wanted, NO_ADAPTERS)
    launched = []
    stages = FusedStages(spec, CPU)
    kernel = gemm.gated_matmul
    monkeypatch.setattr(gemm, "gated_matmul", lambda *a, **k: launched.append(1) or kernel(*a, **k))
    rest = stages.feed(one, x.clone(), residual, NO_ADAPTERS)
    got = residual if rest is None else residual + rest
    assert len(launched) == joined
    assert (got - wanted).norm() < (0.04 if eight else 1e-5) * wanted.norm()


class Config:
    """A weight source without weights."""

    def __init__(self, config):
        self._config = CONFIG | {"num_hidden_layers": 2} | config

    def metadata(self):
        return self._config

    def tensors(self):
        return {}


MODELS = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 2},
    "olmo2": {"model_type": "olmo2", "num_key_value_heads": 2},
    "gemma2": {
        "model_type": "gemma2",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
    },
    "granite": {"model_type": "granite", "residual_multiplier": 0.3, "embedding_multiplier": 2.0},
    "gelu": {"hidden_act": "gelu"},
}


@pytest.fixture
def here(monkeypatch):
    """Everything believes that Triton's kernels run on this device, as in the interpreter they do."""
    for module in (registry, fused, paged_attention):
        monkeypatch.setattr(module, "why_not", lambda device: None)
    monkeypatch.setattr(configs, "row_matmul", lambda *_, **kinds: Matmul(16, 32, 4, 1))


PLAIN = [(name, invariant, False) for name in MODELS for invariant in (False, True)]
ADAPTED = [("llama", False, True), ("llama", True, True), ("gemma2", False, True), ("gelu", False, True)]
SLOW = [
    ("llama with biases", False, False), ("llama", False, True), ("gelu", False, True),
    *((name, True, False) for name in ("qwen3", "olmo2", "gemma2", "granite", "gelu")),  # nothing is fused
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "invariant", "adapted"),
    [pytest.param(*case, marks=pytest.mark.slow) if case in SLOW else case for case in [*PLAIN, *ADAPTED]],
)
@torch.inference_mode()
def test_models(name, invariant, adapted, here):
    """A prompt, and a single token, which has kernels of its own; with LoRA adapters too."""
    torch.manual_seed(3)
    source = Config(MODELS[name])
    model = load_model(source, device=CPU, dtype=torch.float32, random_weights=True, invariant=invariant)
    for module in model.modules().values():
        for tensor in module.tensors().values():
            tensor.normal_(0.5 if tensor.dim() == 1 else 0.0, 0.2)
    if adapted:
        model.reserve_adapters(2, 8)
        for linear in model.adaptable().values():
            linear.lora.used = True
            linear.lora.a[1:].normal_(0, 0.1)
            linear.lora.b[1:].normal_(0, 0.1)
    quick, logits = model.stages, []
    assert isinstance(quick, FusedStages)
    for stages in (Stages(model.spec, CPU, plain=True), quick):
        model.stages = stages
        for tokens in ([5 * i % 64 for i in range(21)], [7]):
            batch, kv = whole_sequence(model.spec.kv_layout(page_size=4, dtype="float32"), len(tokens), CPU)
            batch.adapters = (torch.arange(len(tokens)) + 2) % 3 if adapted else None
            logits.append(model.logits(model.forward(torch.tensor(tokens), batch, kv))[-1])
    for wanted, got in zip(logits[:2], logits[2:], strict=True):
        assert wanted.std() > 0.1
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-4)


def test_what_is_not_fused_is_said(here):
    told = load_model(Config(MODELS["gelu"]), device=CPU, dtype=torch.float32, random_weights=True).describe()
    assert "not fused: gelu of the gate (2 of 2 layers)" in told
    assert told[-1] == "products: dense, norm, gate, residual fused where that is faster"
    told = load_model(Config(MODELS["olmo2"]), device=CPU, dtype=torch.float32, random_weights=True).describe()
    assert "not fused: norms of queries and keys over all heads (2 of 2 layers)" in told
    assert "not fused: norms after mixer and feed, between product and residual (2 of 2 layers)" in told
    told = load_model(Config(MODELS["gemma2"]), device=CPU, dtype=torch.float32, random_weights=True).describe()
    capped = "attention (4 heads, 2 KV, dim 16, window 5, soft cap 2): "
    assert f"{capped}triton" in told and any("no soft cap" in line for line in told if line.startswith(capped))
    assert "not fused: gelu_tanh of the gate (2 of 2 layers)" in told
    told = load_model(Config({}), device=CPU, dtype=torch.float32, random_weights=True, invariant=True).describe()
    assert told[-1] == "products: dense, nothing fused with them" and not any("not fused" in line for line in told)
