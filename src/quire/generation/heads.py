"""Small networks that guess from what the target itself computed: Medusa-type heads and an EAGLE-type drafter.

Both read the hidden state h from which the target drew its last token, and that token's embedding e:

    medusa   one residual block of (h, e) for each token ahead, all at once
    eagle    one decoder layer over the (h, e) of the last positions; its output stands in for the next hidden state,
             so it goes on by itself, token by token

Words are those that answers use most, so that the head stays small; what is beyond them is never guessed. Trained by
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

WINDOW = 16  # positions an EAGLE-type drafter looks back
AHEAD = 8  # ... and the most it goes on by itself


class _Words(nn.Module):
    """The words a drafter knows: ids, embeddings, and the head over them. The last embedding is any other word's."""

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
        self.words = _Words(hidden, words, vocab)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(count))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
        """h [n, hidden] and the token drawn from it [n] → logits over words [n, words], one for each token ahead."""
        h, e = self.norms[0](hidden), self.norms[1](self.words.embedding(tokens))
        both = torch.cat((h, e), -1)
        return [self.words.head(h + F.silu(block(both))) for block in self.blocks]


class EagleDrafter(nn.Module):
    def __init__(self, hidden: int, words: int, vocab: int, heads: int):
        super().__init__()
        self.words = _Words(hidden, words, vocab)
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(5))
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.keys = nn.Linear(hidden, 2 * hidden, bias=False)  # and values
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.distance = nn.Parameter(torch.zeros(heads, WINDOW + AHEAD))
        self.up = nn.Linear(hidden, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, hidden, bias=False)

    def inputs(self, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(h, token) of n positions → what the layer reads there [n, hidden], its keys and values [n, 2 hidden]."""
        joined = self.join(torch.cat((self.norms[0](hidden), self.norms[1](self.words.embedding(tokens))), -1))
        return joined, self.keys(self.norms[2](joined))

    def forward(self, joined: torch.Tensor, pages: torch.Tensor, ahead: int, valid: torch.Tensor) -> torch.Tensor:
        """joined [n, hidden]; keys and values [n, WINDOW + ahead, 2 hidden], oldest first, the last its own; `valid`
        [n, WINDOW] tells which of the first are there → the next hidden state, as far as it can be guessed."""
        size = joined.shape[-1] // self.heads
        query = self.query(self.norms[2](joined)).unflatten(-1, (self.heads, size))
        keys, values = (part.unflatten(-1, (self.heads, size)) for part in pages.chunk(2, -1))
        scores = torch.einsum("nhd,nmhd->nhm", query, keys) * size**-0.5
        scores = scores + self.distance[:, : WINDOW + ahead].flip(-1)
        scores[:, :, :WINDOW] = scores[:, :, :WINDOW].masked_fill(~valid[:, None], float("-inf"))
        mixed = torch.einsum("nhm,nmhd->nhd", scores.softmax(-1), values).flatten(1)
        x = joined + self.out(mixed)
        gate, up = self.up(self.norms[3](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, words]"""
        return self.words.head(self.norms[4](state))


Heads = MedusaHeads | EagleDrafter


def save_heads(heads: Heads, path: str | Path, about: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    kind = "medusa" if isinstance(heads, MedusaHeads) else "eagle"
    tensors = {
        name: (t if t.dtype == torch.int64 else t.half()).contiguous() for name, t in heads.state_dict().items()
    }
    save_file(tensors, path, metadata={"quire": json.dumps({"kind": kind, **about})})


def load_heads(kind: str, path: str, *, hidden: int, vocab: int, device: torch.device) -> Heads:
    """What `save_heads` wrote, checked against the model it shall draft for."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("quire", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelFileError(f"cannot read draft heads from {path!r}: {error}") from None
    if about.get("kind") != kind or "words.ids" not in tensors:
        raise ConfigError(f"{path!r} holds no {kind} heads; train some with scripts/train_draft.py --kind {kind}")
    words, width = tensors["words.ids"].shape[0], tensors["words.embed"].shape[-1]
    if width != hidden or int(tensors["words.ids"].max()) >= vocab or int(tensors["words.ids"].min()) < 0:
        raise ConfigError(f"the heads in {path!r} were trained for another model; train some for this one")
    heads: Heads
    if kind == "medusa":
        heads = MedusaHeads(hidden, words, vocab, sum(name.endswith("weight") for name in tensors if "blocks" in name))
    else:
        heads = EagleDrafter(hidden, words, vocab, tensors["distance"].shape[0] if "distance" in tensors else 1)
    try:
        heads.load_state_dict({n: t if t.dtype == torch.int64 else t.float() for n, t in tensors.items()})
    except RuntimeError as error:
        raise ModelFileError(f"the heads in {path!r} are damaged: {error}") from None
    heads.words.index()
    return heads.to(device).eval().requires_grad_(False)
