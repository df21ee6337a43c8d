"""How far logits on a GPU are from fp32: bf16 in plain torch, fused and without overlapped launches; 8-bit weights; and
8-bit pages too."""

from __future__ import annotations

import torch

from quire.assets import resolve
from quire.bench.suite import DATA
from quire.bench.verify import sequence_logits
from quire.bench.workloads import fixed
from quire.kernels.triton import launch
from quire.model import load_model
from quire.model.blocks.fused import choose_stages
from quire.model.blocks.stages import Stages
from quire.model.decoder import Model
from quire.model.quantization.fp8 import Fp8Scheme


@torch.inference_mode()
def main() -> None:
    device = torch.device("cuda")
    source = resolve(str(DATA / "llama-3.1-8b")).open()
    model = load_model(source, device=device, dtype=torch.bfloat16, random_weights=True)
    assert isinstance(model, Model)
    exact = Model(model.spec, device=device, dtype=torch.float32)
    exact.stages = Stages(model.spec, device, plain=True)
    for name, module in exact.modules().items():
        for kind, tensor in module.tensors().items():
            tensor.copy_(model.modules()[name].tensors()[kind])
    exact.finish()
    layouts = {m.dtype: m.spec.kv_layout(page_size=16, dtype=m.kv_dtype) for m in (model, exact)}
    overlaps = launch.overlaps
    eight = load_model(source, device=device, dtype=torch.bfloat16, random_weights=True, scheme=Fp8Scheme())
    assert isinstance(eight, Model)
    for count in (1, 7, 32, 100, 700, 2000):
        tokens = list(fixed(1, count, 1, seed=count)[0].prompt)
        truth = sequence_logits(exact, layouts[torch.float32], tokens, 1)
        errors = {}
        for name in ("plain", "fused", "fused apart"):
            launch.overlaps = (lambda _: False) if name == "fused apart" else overlaps
            plain = name == "plain"
            model.stages = Stages(model.spec, device, plain=True) if plain else choose_stages(model.spec, device)
            found = sequence_logits(model, layouts[torch.bfloat16], tokens, 1)
            errors[name] = ((found - truth).norm() / truth.norm()).item()
        for name, kv in (("fp8", "bfloat16"), ("fp8, KV too", "float8_e4m3fn"), ("fp8, KV int8", "int8")):
            found = sequence_logits(eight, model.spec.kv_layout(page_size=16, dtype=kv), tokens, 1)
            errors[name] = ((found - truth).norm() / truth.norm()).item()
        print(count, {name: f"{error:.4f}" for name, error in errors.items()})


if __name__ == "__main__":
    main()
