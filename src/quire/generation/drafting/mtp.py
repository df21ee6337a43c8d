"""A drafter out of a model's own multi-token-prediction layer, with the face of `heads.EagleDrafter`.

    state, token ──► project (embedding | state) ──► the layer, over the positions sampled last ──► next state ──► head

The layer's weights and its MLP or experts are those of `model`'s blocks; its attention is over a window
(`window_attention`). Refuses to know: contexts, files.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.generation.drafting.published_heads import Embed
from quire.generation.drafting.window_attention import KeysAndValues, attend, rotated
from quire.kernels.batch_assembly import whole_sequence
from quire.model.blocks.attention import AttentionBlock
from quire.model.blocks.latent import LatentBlock
from quire.model.blocks.rope_scaling import NO_ROTATION, inverse_frequencies
from quire.model.blocks.stages import Step
from quire.model.loading.mtp_layer import MtpLayer


class DraftWords:
    """All of the model's tokens."""

    def __init__(self, ids: torch.Tensor):
        self.ids = ids


class MtpDrafter:
    layers: tuple[int, ...] = ()  # of the target, whose states it reads besides the last

    def __init__(self, layer: MtpLayer, embed: Embed):
        self._mtp, self._model, self._embed = layer, layer.model, embed
        model = layer.model
        mixer = model.layers[0].mixer
        assert isinstance(mixer, AttentionBlock | LatentBlock)
        self._mixer, spec = mixer, model.spec
        self.words = DraftWords(torch.arange(spec.vocab_size, device=model.device))
        rope = spec.layers[0].mixer.rope or NO_ROTATION
        self._rope = inverse_frequencies(rope, spec.max_position, model.length)
        self._step = Step(*whole_sequence(spec.kv_layout(page_size=1, dtype=model.kv_dtype), 1, model.device), {})

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's last hidden states [..., hidden] → states to draft from."""
        return hidden_states.to(self._model.dtype)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._model.stages.ops.rms_norm(x, weight, self._model.final_norm.eps)

    def inputs(self, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States and the tokens sampled from them → what the layer reads there (its input, then queries), and its keys
        and values, which are rotated when it is known how far back they are."""
        mtp, shape = self._mtp, tokens.shape
        states, embedded = states.flatten(0, -2), self._embed(tokens.flatten()).to(states.dtype)
        both = torch.cat((self._norm(embedded, mtp.embed_norm), self._norm(states, mtp.hidden_norm)), -1)
        x = F.linear(both, mtp.project)
        queries, kv = self._project(self._model.stages.norm(self._mixer.norm, None, x))
        return torch.cat((x, queries), -1).unflatten(0, shape), kv.unflatten(0, shape)

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries (and gates), keys and values of positions [tokens, hidden], unrotated and flat."""
        mixer, ops = self._mixer, self._model.stages.ops
        if isinstance(mixer, LatentBlock):
            return mixer.unrotated(x, ops)
        heads, kv_heads, dim = mixer.attention.heads, mixer.attention.kv_heads, mixer.attention.head_dim
        widths = (heads * dim, heads * dim * mixer.gated, kv_heads * dim, kv_heads * dim)
        q, gates, k, v = mixer.qkv(x).split(widths, -1)
        if mixer.q_norm is not None and mixer.k_norm is not None:
            q = ops.rms_norm(q.unflatten(-1, (heads, dim)).contiguous(), mixer.q_norm.weight, mixer.q_norm.eps)
            k = ops.rms_norm(k.unflatten(-1, (kv_heads, dim)).contiguous(), mixer.k_norm.weight, mixer.k_norm.eps)
            q, k = q.flatten(1), k.flatten(1)
        return torch.cat((q, gates), -1), torch.cat((k, v), -1)

    def _keys_and_values(self, kv: torch.Tensor, back: torch.Tensor) -> KeysAndValues:
        """Of all query heads, [..., heads, dim] each."""
        spec = self._mixer.attention
        if spec.values_from is not None:
            keys = rotated(kv.unflatten(-1, (spec.kv_heads, spec.head_dim)), back, *self._rope)
            values = keys[..., spec.values_from :]
        else:
            keys, values = (part.unflatten(-1, (spec.kv_heads, spec.head_dim)) for part in kv.chunk(2, -1))
            keys = rotated(keys, back, *self._rope)
        share = spec.heads // spec.kv_heads
        return keys.repeat_interleave(share, -2), values.repeat_interleave(share, -2)

    def __call__(
        self,
        joined: torch.Tensor,
        context_kv: torch.Tensor,
        distances: torch.Tensor,
        mask: torch.Tensor,
        draft_kv: list[torch.Tensor],
    ) -> torch.Tensor:
        """The next states, [n, t, hidden]; arguments as those of `heads.EagleDrafter`."""
        spec, mixer, model = self._mixer.attention, self._mixer, self._model
        width = spec.heads * spec.head_dim
        x, q, gates = joined.split((model.spec.hidden, width, joined.shape[-1] - model.spec.hidden - width), -1)
        q = q.unflatten(-1, (spec.heads, spec.head_dim))
        q = rotated(q, torch.zeros_like(q[..., 0, 0]), *self._rope) * spec.scale
        backs = range(len(draft_kv) - 1, -1, -1)
        own = [
            self._keys_and_values(entry, torch.full_like(entry[..., 0], back))
            for back, entry in zip(backs, draft_kv, strict=True)
        ]
        mixed = attend(q, self._keys_and_values(context_kv, distances), mask, own).flatten(0, 1)
        if isinstance(mixer, LatentBlock):
            out = mixer.o(mixer.values(mixed))
        else:
            gated = mixed.flatten(1) * gates.flatten(0, 1).sigmoid() if mixer.gated else mixed.flatten(1)
            out = mixer.o(gated)
        residual, feed = x.flatten(0, 1).clone(), model.layers[0].feed
        assert feed is not None
        fed = model.stages.feed(feed, out, residual, self._step)
        behind = residual if fed is None else residual + fed
        if self._mtp.goes_on_normed:
            behind = model.stages.norm(model.final_norm, None, behind)
        return behind.unflatten(0, x.shape[:2])

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., hidden] → [..., vocabulary]"""
        flat = states.flatten(0, -2)
        if not self._mtp.goes_on_normed:
            flat = self._model.stages.norm(self._model.final_norm, None, flat)
        return self._model.logits(flat).unflatten(0, states.shape[:-1])
