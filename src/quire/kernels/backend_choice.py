"""Which implementation runs here, and why: backends in order of preference, the first that can is taken."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.kernels.attention_backend import AttentionBackend, AttentionSpec
from quire.kernels.batch_assembly import Assembled, assemble
from quire.kernels.eager import grouped_lora
from quire.kernels.eager import torch_ops as eager_ops
from quire.kernels.eager.sdpa_attention import TorchSdpa
from quire.kernels.library.cudnn_prefill import CudnnPrefill
from quire.kernels.op_signatures import LoraOps, Ops
from quire.kernels.reference.plain_attention import ReferenceAttention
from quire.kernels.triton import why_not
from quire.types.errors import ConfigError


def backends_for(device: torch.device, *, plain: bool = False, invariant: bool = False) -> list[AttentionBackend]:
    """Those worth considering there, best first; `plain`: only torch's own operations; `invariant`: only what gives a
    row the same bits in any batch."""
    backends: list[AttentionBackend] = [] if invariant else [TorchSdpa(), ReferenceAttention()]
    if not plain and why_not(device) is None:
        from quire.kernels.triton.latent_attention import LatentAttention
        from quire.kernels.triton.page_gather import gather_tokens
        from quire.kernels.triton.paged_attention import TritonAttention

        paged = TritonAttention(invariant=invariant)
        backends[:0] = [paged] if invariant else [CudnnPrefill(paged, gather=gather_tokens), paged, LatentAttention()]
    return backends


def choose_backend(
    spec: AttentionSpec, device: torch.device, *, plain: bool = False, invariant: bool = False
) -> tuple[AttentionBackend, list[str]]:
    """The backend for layers like `spec` on `device`, with one line for each that was considered."""
    reasons = []
    for backend in backends_for(device, plain=plain, invariant=invariant):
        refusal = backend.supports(spec, device)
        if refusal is None:
            reasons.append(f"attention {describe(spec)}: {backend.name}")
            return backend, reasons
        reasons.append(f"attention {describe(spec)}: not {backend.name}, {refusal}")
    if invariant:
        raise ConfigError(f"no attention gives invariant results here: {'; '.join(reasons) or 'it needs Triton'}")
    raise AssertionError("the reference backend supports everything")


def choose_assemble(device: torch.device) -> Callable[..., Assembled]:
    """What makes a step's batch out of the slots' state: `kernels.batch.assemble` or its twin."""
    if why_not(device) is not None:
        return assemble
    from quire.kernels.triton.batch_gather import assemble as fused

    return fused


def describe(spec: AttentionSpec) -> str:
    reach = "full" if spec.window is None else f"{'chunks of' if spec.chunked else 'window'} {spec.window}"
    cap = "" if spec.softcap is None else f", soft cap {spec.softcap:g}"
    sinks = "" if spec.sinks is None else ", sinks"
    return f"({spec.heads} heads, {spec.kv_heads} KV, dim {spec.head_dim}, {reach}{cap}{sinks})"


def choose_ops(device: torch.device, *, plain: bool = False) -> Ops:
    """The operations for `device`; plain torch runs on all of them."""
    if not plain and why_not(device) is None:
        from quire.kernels.triton import triton_ops

        return triton_ops
    return eager_ops


def choose_lora(device: torch.device, *, plain: bool = False) -> LoraOps:
    """The grouped products of adapters."""
    if not plain and why_not(device) is None:
        from quire.kernels.triton import lora_kernels

        return lora_kernels
    return grouped_lora
