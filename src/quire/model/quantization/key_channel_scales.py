"""Keys scaled by channel before they go to pages (the KIVI arrangement: keys by channel, values by token).

Some channels of keys are many times larger than the others in every token. A scale for each token and head would then
be theirs, and the others lose their bits. Keys divided by a factor per channel, and queries multiplied with it, leave
attention what it is:  q . k = (q * f) . (k / f).  Factors are powers of two and the model's own weights take them in,
so that nothing is rounded and nothing more computed (keys are in fact multiplied, by the largest factor over f, and the
scale of the scores makes up for it: weights never become too small for their format). Within a rotary pair they are
equal, so that they commute with the rotation.

Refuses to know: how pages round.
"""

from __future__ import annotations

import torch

from quire.kernels.batch_assembly import whole_sequence
from quire.kernels.kv_views import read_tokens
from quire.model.runnable import Runnable
from quire.types.errors import ConfigError

TOKENS = 256  # looked at; which they are matters little, large channels are large for all


@torch.inference_mode()
def key_factors(model: Runnable) -> torch.Tensor:
    """[layers, kv_heads, head_dim] float32: 1 for most channels, 2^n for those more than 2^n times the usual size."""
    spec = model.spec
    if spec.recurrent:
        raise ConfigError("keys scaled by channel are for attention, and this model has recurrent layers")
    if len({(mixer.kv_heads, mixer.head_dim, mixer.kv_from) for mixer in spec.attending.values()}) > 1:
        raise ConfigError("keys scaled by channel are for layers with keys of their own, of one size")
    count = min(TOKENS, model.length)
    drawn = torch.randint(spec.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
    batch, kv = whole_sequence(spec.kv_layout(page_size=16, dtype=model.kv_dtype), count, model.device)
    model.forward(drawn.to(model.device), batch, kv)
    sizes = torch.empty(len(spec.layers), spec.kv_heads, spec.head_dim)
    for index, group in enumerate(kv.layout.groups):
        keys, _ = read_tokens(kv, index, batch.groups[index].kv_slots)
        sizes[list(group.layers)] = keys.abs().amax(0).cpu()
    for layer, size in zip(spec.layers, sizes, strict=True):
        if (rope := layer.mixer.rope) is not None:
            half = rope.dim // 2
            pairs = torch.maximum(size[..., :half], size[..., half : 2 * half])
            size[..., : 2 * half] = torch.cat((pairs, pairs), dim=-1)
    shared = [
        mixer.qk_norm in ("head", "unit") for mixer in spec.attending.values()
    ]  # all heads share the norm's weights
    if any(shared):
        sizes[shared] = sizes[shared].amax(1, keepdim=True).expand_as(sizes[shared])
    usual = sizes.median(-1, keepdim=True).values.clamp(min=1e-12)
    return torch.exp2(torch.log2(sizes.clamp(min=1e-12) / usual).floor_().clamp_(0, 8))
