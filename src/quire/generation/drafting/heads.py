"""Draft heads, small networks over the hidden states of the target: Medusa-type heads and an EAGLE-type drafter.

Both read the hidden state h from which the target sampled its last token, and that token's embedding e:

    medusa   one residual block of (h, e) for each token ahead, all at once
    eagle    one decoder layer over the (h, e) of the last positions, h fused from the target's states after an
             early, a middle and the last layer; its output stands in for the next h, so it goes on by itself

The draft vocabulary is what answers use most, so that the head stays small; other tokens are never drafted. Trained by
`scripts/train_draft.py`, kept as safetensors. Refuses to know: contexts, how the target is run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quire.types.errors import ConfigError, ModelFileError

WINDOW_TOKENS = 64  # that an EAGLE-type drafter attends to
MAX_DRAFT_POSITIONS = 8  # tokens it may draft from its own states


class _DraftVocabulary(nn.Module):
    """The tokens a drafter knows: ids, embeddings, and the head over them. The last embedding is any other token's."""

    ids: torch.Tensor
    places: torch.Tensor

    def __init__(self, hidden: int, words: int, vocab: int):
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(words + 1, hidden))
        self.head = nn.Linear(hidden, words, bias=False)
        self.register_buffer("ids", torch.zeros(words, dtype=torch.int64))
        self.register_buffer("places", torch.full((vocab,), words, dtype=torch.int64), persistent=False)

    def index(self) -> None:
        """After the ids are in: where each token id stands among them."""
        self.places[self.ids] = torch.arange(len(self.ids), device=self.ids.device)

    def embedding(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed[self.places[tokens]]


class MedusaHeads(nn.Module):
    def __init__(self, hidden: int, words: int, vocab: int, count: int):
        super().__init__()
        self.words = _DraftVocabulary(hidden, words, vocab)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(3))
        self.up = nn.Linear(2 * hidden, 2 * hidden, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(4 * hidden, hidden) for _ in range(count))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
        """h [..., hidden] and the token sampled from it [...] → logits [..., words] for each token ahead."""
        both = torch.cat((self.norms[0](hidden), self.norms[1](self.words.embedding(tokens))), -1)
        both = torch.cat((both, F.silu(self.up(both))), -1)
        return [self.words.head(self.norms[2](block(both))) for block in self.blocks]


class EagleDrafter(nn.Module):
    """One decoder layer. `layers`: after which of the target's it reads hidden states, besides the last."""

    def __init__(self, hidden: int, words: int, vocab: int, heads: int, layers: tuple[int, ...]):
        super().__init__()
        self.words = _DraftVocabulary(hidden, words, vocab)
        self.heads = heads
        self.layers = layers
        self.depths = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(len(layers) + 1))
        self.fuse = nn.Linear((len(layers) + 1) * hidden, hidden, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(5))
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.keys = nn.Linear(hidden, 2 * hidden, bias=False)  # and values
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.distance = nn.Parameter(torch.zeros(heads, WINDOW_TOKENS + MAX_DRAFT_POSITIONS))
        self.up = nn.Linear(hidden, 6 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states of the target [..., (layers + 1) hidden] → states to draft from [..., hidden]."""
        parts = hidden_states.chunk(len(self.depths), -1)
        return self.fuse(torch.cat([norm(part) for norm, part in zip(self.depths, parts, strict=True)], -1))

    def inputs(self, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States and the tokens sampled from them → what the layer reads there [..., hidden], and its keys and values
        [..., 2 hidden]. A state is the target's (`features`), or the drafter's own."""
        joined = self.join(torch.cat((self.norms[0](states), self.norms[1](self.words.embedding(tokens))), -1))
        return joined, self.keys(self.norms[2](joined))

    def forward(
        self,
        joined: torch.Tensor,
        context_kv: torch.Tensor,
        distances: torch.Tensor,
        mask: torch.Tensor,
        draft_kv: list[torch.Tensor],
    ) -> torch.Tensor:
        """The next states, [n, t, hidden].

        joined [n, t, hidden]: t queries of each of n sequences;  context_kv [n, s, 2 hidden]: keys and values of the
        target's positions, `distances` [t, s] before the queries, which attend where `mask` [n or 1, t, s] is set;
        draft_kv: those of each query's own draft tokens, [n, t, 2 hidden] each, the query itself last (if context_kv
        does not hold it)."""
        size = joined.shape[-1] // self.heads
        split = (self.heads, size)
        query = self.query(self.norms[2](joined)).unflatten(-1, split) * size**-0.5
        keys, values = (part.unflatten(-1, split) for part in context_kv.chunk(2, -1))
        scores = torch.einsum("nthd,nshd->nhts", query, keys) + self.distance[:, distances]
        parts = [scores.masked_fill(~mask[:, None], float("-inf"))]
        pairs = [[part.unflatten(-1, split) for part in entry.chunk(2, -1)] for entry in draft_kv]
        for back, (key, _) in zip(range(len(draft_kv) - 1, -1, -1), pairs, strict=True):
            parts.append(((query * key).sum(-1) + self.distance[:, back]).transpose(1, 2)[..., None])
        weights = torch.cat(parts, -1).softmax(-1)  # [n, heads, t, s + draft_kv]
        count = context_kv.shape[1]
        mixed = torch.einsum("nhts,nshd->nthd", weights[..., :count], values)
        for i, (_, value) in enumerate(pairs):
            mixed = mixed + weights[..., count + i].transpose(1, 2)[..., None] * value
        x = joined + self.out(mixed.flatten(2))
        gate, up = self.up(self.norms[3](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., hidden] → [..., words]"""
        return self.words.head(self.norms[4](states))


Heads = MedusaHeads | EagleDrafter


def save_heads(heads: Heads, path: str | Path, metadata: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    if isinstance(heads, MedusaHeads):
        metadata = {"kind": "medusa", **metadata}
    else:
        metadata = {"kind": "eagle", "layers": heads.layers, **metadata}
    tensors = {
        name: (t if t.dtype == torch.int64 else t.half()).cpu().contiguous() for name, t in heads.state_dict().items()
    }
    save_file(tensors, path, metadata={"quire": json.dumps(metadata)})


def load_heads(kind: str, path: str, *, hidden: int, layers: int, vocab: int, device: torch.device) -> Heads:
    """What `save_heads` wrote, checked against the model it shall draft for."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get("quire", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelFileError(f"cannot read draft heads from {path!r}: {error}") from None
    if metadata.get("kind") != kind or "words.ids" not in tensors:
        raise ConfigError(f"{path!r} holds no {kind} heads; train some with scripts/train_draft.py --{kind} FILE")
    words, width, layer_ids = (
        tensors["words.ids"].shape[0],
        tensors["words.embed"].shape[-1],
        metadata.get("layers", []),
    )
    mismatched = not isinstance(layer_ids, list) or any(
        not isinstance(i, int) or not 0 <= i < layers for i in layer_ids
    )
    if mismatched or width != hidden or int(tensors["words.ids"].max()) >= vocab or int(tensors["words.ids"].min()) < 0:
        raise ConfigError(f"the heads in {path!r} were trained for another model; train some for this one")
    heads: Heads
    if kind == "medusa":
        heads = MedusaHeads(hidden, words, vocab, sum(name.endswith("weight") for name in tensors if "blocks" in name))
    else:
        count = tensors["distance"].shape[0] if "distance" in tensors else 1
        heads = EagleDrafter(hidden, words, vocab, count, tuple(layer_ids))
    try:
        heads.load_state_dict({n: t if t.dtype == torch.int64 else t.float() for n, t in tensors.items()})
    except RuntimeError as error:
        raise ModelFileError(f"the heads in {path!r} are damaged: {error}") from None
    heads.words.index()
    return heads.to(device).eval().requires_grad_(False)
