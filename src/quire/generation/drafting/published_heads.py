"""Draft heads as others publish them, from directories of safetensors and a config.json: EAGLE-3 and Medusa.

    eagle    fc over three of the target's hidden states; one decoder layer whose attention reads the token's embedding
             beside the state (2 x hidden wide); a head over a reduced vocabulary, with d2t from its ids to the target's
    medusa   for each token ahead residual blocks and a head of its own, over the target's last hidden state

They have the faces of `heads`, so that the same proposers draft with them. EAGLE-3 drafters attend to the positions
that were sampled last, as ours do, not to the whole prompt. Refuses to know: contexts, how the target is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quire.generation.drafting.window_attention import attend, rotated
from quire.model.blocks.rope_scaling import inverse_frequencies
from quire.model.families.architecture import Fields, rope_spec
from quire.types.errors import ConfigError, ModelFileError

Embed = Callable[[torch.Tensor], torch.Tensor]  # token ids → the target's embeddings
_LAYER = re.compile(r"(?:model\.)?(?:midlayer|layers\.0)\.")
_MEDUSA = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(?:(linear)\.)?(weight|bias)")


class _DraftIds(nn.Module):
    ids: torch.Tensor  # of the draft vocabulary, the target's

    def __init__(self, ids: torch.Tensor):
        super().__init__()
        self.register_buffer("ids", ids)


class PublishedMedusaHeads(nn.Module):
    """`count` heads of `depth` residual blocks each, over the target's whole vocabulary."""

    def __init__(self, hidden: int, vocab: int, count: int, depth: int):
        super().__init__()
        self.words = _DraftIds(torch.arange(vocab))
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth)) for _ in range(count)
        )
        self.heads = nn.ModuleList(nn.Linear(hidden, vocab, bias=False) for _ in range(count))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Logits [..., vocabulary] for each token behind the one that was sampled from h [..., hidden]."""
        weights = next(self.parameters(), hidden)  # none, where they are packed
        hidden, found = hidden.to(weights.dtype), []
        for blocks, head in zip(self.blocks, self.heads, strict=True):
            state = hidden
            assert isinstance(blocks, nn.ModuleList)
            for block in blocks:
                state = state + F.silu(block(state))
            found.append(head(state))
        return found


class Eagle3Drafter(nn.Module):
    """`layers`: after which of the target's it reads hidden states; `picked`: which of these are the three of fc."""

    def __init__(
        self, config: Fields, words: int, ids: torch.Tensor, layers: tuple[int, ...], picked: list[int], embed: Embed
    ):
        super().__init__()
        hidden = config.integer("hidden_size", most=1 << 20)
        eps = config.number("rms_norm_eps", 1e-6)
        self.hidden = hidden
        self.attention_heads = config.integer("num_attention_heads")
        self.kv_heads = config.integer("num_key_value_heads", self.attention_heads)
        self.head_dim = config.integer("head_dim", hidden // self.attention_heads)
        inner, bias = config.integer("intermediate_size", most=1 << 24), config.flag("attention_bias")
        self.layers, self._picked, self._embed = layers, picked, embed
        self.words = _DraftIds(ids)
        queries, keys = self.attention_heads * self.head_dim, self.kv_heads * self.head_dim
        self.fc = nn.Linear(len(picked) * hidden, hidden, bias=False)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm, self.norm = (
            nn.RMSNorm(hidden, eps) for _ in range(4)
        )
        self.q_proj = nn.Linear(2 * hidden, queries, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(2 * hidden, keys, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(queries, hidden, bias=bias)
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.lm_head = nn.Linear(hidden, words, bias=False)
        longest = config.integer("max_position_embeddings", 2048, most=1 << 30)
        rope = rope_spec(config.config, self.head_dim, longest)
        self._rope = inverse_frequencies(rope, longest, longest)

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states of the target [..., (layers + 1) hidden] → states to draft from [..., hidden]."""
        parts = hidden_states.to(self.norm.weight.dtype).split(self.hidden, -1)
        return self.fc(torch.cat([parts[i] for i in self._picked], -1))

    def inputs(self, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States and the tokens sampled from them → what the layer reads there, and its keys and values, which are
        rotated when it is known how far back they are."""
        embedded = self.input_layernorm(self._embed(tokens).to(states.dtype))
        both = torch.cat((embedded, self.hidden_norm(states)), -1)
        return torch.cat((states, both), -1), torch.cat((self.k_proj(both), self.v_proj(both)), -1)

    def _keys_and_values(self, kv: torch.Tensor, back: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all query heads, [..., heads, dim] each."""
        keys, values = (part.unflatten(-1, (self.kv_heads, self.head_dim)) for part in kv.chunk(2, -1))
        share, keys = self.attention_heads // self.kv_heads, rotated(keys, back, *self._rope)
        return keys.repeat_interleave(share, -2), values.repeat_interleave(share, -2)

    def forward(
        self,
        joined: torch.Tensor,
        context_kv: torch.Tensor,
        distances: torch.Tensor,
        mask: torch.Tensor,
        draft_kv: list[torch.Tensor],
    ) -> torch.Tensor:
        """The next states, [n, t, hidden]; arguments as those of `heads.EagleDrafter`."""
        states, both = joined.split((self.hidden, 2 * self.hidden), -1)
        query = self.q_proj(both).unflatten(-1, (self.attention_heads, self.head_dim))
        query = rotated(query, torch.zeros_like(both[..., 0]), *self._rope) * self.head_dim**-0.5
        backs = range(len(draft_kv) - 1, -1, -1)
        own = [
            self._keys_and_values(entry, torch.full_like(entry[..., 0], back))
            for back, entry in zip(backs, draft_kv, strict=True)
        ]
        mixed = attend(query, self._keys_and_values(context_kv, distances), mask, own)
        x = states + self.o_proj(mixed.flatten(2))
        normed = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., hidden] → [..., words]"""
        return self.lm_head(self.norm(states))


PublishedHeads = PublishedMedusaHeads | Eagle3Drafter


def load_published(
    kind: str,
    path: str,
    *,
    hidden: int,
    layers: int,
    vocab: int,
    device: torch.device,
    dtype: torch.dtype,
    embed: Embed,
) -> PublishedHeads:
    """The heads in a directory, checked against the model they shall draft for; `embed`: its embeddings."""
    config, tensors = _read(path)
    try:
        if kind == "medusa":
            heads: PublishedHeads = _medusa(config, tensors, hidden, vocab)
        else:
            heads = _eagle(config, tensors, hidden, layers, vocab, embed)
    except (ModelFileError, RuntimeError) as error:
        raise ModelFileError(f"the {kind} heads in {path!r} cannot be used: {error}") from None
    return heads.to(device, dtype).eval().requires_grad_(False)


def _read(path: str) -> tuple[Fields, dict[str, torch.Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    directory, tensors = Path(path), dict[str, torch.Tensor]()
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pt"))
        why = "a pickle, which is never read here; save them as safetensors" if pickled else "not there"
        raise ModelFileError(f"the weights of the draft heads in {path!r} are {why}")
    try:
        config: Any = json.loads((directory / "config.json").read_bytes())
        for file in files:
            tensors |= load_file(file)
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelFileError(f"cannot read draft heads from {path!r}: {error}") from None
    if not isinstance(config, dict):
        raise ModelFileError(f"cannot read draft heads from {path!r}: config.json holds no object")
    return Fields(config), tensors


def _medusa(config: Fields, tensors: dict[str, torch.Tensor], hidden: int, vocab: int) -> PublishedMedusaHeads:
    depth = config.integer("medusa_num_layers", 1, most=16)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        match = _MEDUSA.fullmatch(name)
        if match is None:
            raise ModelFileError(f"unexpected tensor {name!r}")
        head, block, linear, part = match.groups()
        found[f"blocks.{head}.{block}.{part}" if linear else f"heads.{head}.{part}"] = tensor
    count = sum(name.startswith("heads.") for name in found)
    if count != config.integer("medusa_num_heads", count, most=64):
        raise ModelFileError(f"medusa_num_heads is {config.raw('medusa_num_heads')}, tensors are of {count} heads")
    _same(found.get("heads.0.weight", torch.empty(0)), (vocab, hidden))
    heads = PublishedMedusaHeads(hidden, vocab, count, depth)
    heads.load_state_dict(found | {"words.ids": heads.words.ids})
    return heads


def _eagle(
    config: Fields, tensors: dict[str, torch.Tensor], hidden: int, layers: int, vocab: int, embed: Embed
) -> Eagle3Drafter:
    found = {}
    for name, tensor in tensors.items():
        inner = _LAYER.sub("", name).removeprefix("model.").removeprefix("self_attn.").removeprefix("mlp.")
        found[inner] = tensor
    offsets, _ = found.pop("d2t", None), found.pop("t2d", None)
    if (table := found.pop("embed_tokens.weight", None)) is not None:
        _same(table, (vocab, hidden))
        embed = nn.Embedding.from_pretrained(table)
    words = found["lm_head.weight"].shape[0] if "lm_head.weight" in found else 0
    ids = torch.arange(words) if offsets is None else torch.arange(words) + offsets.long()
    if not words or ids.shape != (words,) or int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise ModelFileError(f"its draft vocabulary of {words} tokens is not one of the model's {vocab}")
    if config.integer("hidden_size", most=1 << 20) != hidden:
        raise ConfigError(f"its hidden size is {config.raw('hidden_size')}, the model's {hidden}")
    taps = _taps(config, layers)
    shown = tuple(sorted(set(taps)))
    drafter = Eagle3Drafter(config, words, ids, shown, [shown.index(layer) for layer in taps], embed)
    found |= {"words.ids": ids} | ({} if table is None else {"_embed.weight": table})
    drafter.load_state_dict(found)
    return drafter


def _taps(config: Fields, layers: int) -> list[int]:
    """After which layers fc reads the target's states; published numbers are of the layers that read them next."""
    said = (config.raw("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or [2, layers // 2, layers - 3]
    if not isinstance(said, list) or not all(isinstance(i, int) and 1 <= i <= layers for i in said):
        raise ModelFileError(f"it reads hidden states before layers {said}, the model has {layers}")
    return [i - 1 for i in said]


def _same(tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ConfigError(f"a tensor of {tuple(tensor.shape)} should be {shape}: they were made for another model")
