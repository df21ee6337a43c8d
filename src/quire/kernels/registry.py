"""Which implementation runs here, and why: backends in order of preference, the first that can is taken."""

from __future__ import annotations

import torch

from quire.kernels.attention import AttentionBackend, AttentionSpec
from quire.kernels.eager import ops as eager_ops
from quire.kernels.eager.attention import TorchSdpa
from quire.kernels.ops import Ops
from quire.kernels.reference.attention import ReferenceAttention

BACKENDS: tuple[AttentionBackend, ...] = (TorchSdpa(), ReferenceAttention())


def choose_backend(spec: AttentionSpec, device: torch.device) -> tuple[AttentionBackend, list[str]]:
    """The backend for layers like `spec` on `device`, with one line for each that was considered."""
    reasons = []
    for backend in BACKENDS:
        refusal = backend.supports(spec, device)
        if refusal is None:
            reasons.append(f"attention {describe(spec)}: {backend.name}")
            return backend, reasons
        reasons.append(f"attention {describe(spec)}: not {backend.name}, {refusal}")
    raise AssertionError("the reference backend supports everything")


def describe(spec: AttentionSpec) -> str:
    reach = "full" if spec.window is None else f"window {spec.window}"
    return f"({spec.heads} heads, {spec.kv_heads} KV, dim {spec.head_dim}, {reach})"


def choose_ops(device: torch.device) -> Ops:
    """The operations for `device`; plain torch runs on all of them."""
    return eager_ops
