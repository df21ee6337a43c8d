"""Tensor parallelism as data: which part of every matrix a rank has, and the decoder that is left of the whole.

    attention    heads; KV heads, or copies of one where there are fewer than ranks      o by columns
    latent       heads, of queries and of what leaves the latent space; pages are whole   o by columns
    recurrent    heads or channels, with their convolutions and states                    o by columns
    feed         intermediate size, of each expert too, or (expert parallelism) experts   down by columns
    vocabulary   rows of the embeddings and of the head

What row-parallel products leave is added up over ranks (`Stages.leave`); norms, routers and per-layer inputs are whole
on every rank. Refuses to know: how ranks talk, files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quire.model.decoder_spec import Attention, DecoderSpec, Dense, Experts, Latent, LayerSpec, Mixer
from quire.model.recurrent_spec import GatedDelta, Mamba2, ShortConv
from quire.types.errors import ConfigError


@dataclass(frozen=True)
class Shard:
    """A rank's part of a module: which rows of the whole, in order, and which columns; None: all."""

    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    biased: bool = True  # whether it has the bias of a product that is added up: one rank alone has

    def place(self, first: int, count: int) -> tuple[int, torch.Tensor | None]:
        """Of rows first .. first + count of the whole: at which of its own they begin, and which of them it has."""
        if self.rows is None:
            return first, None
        begin, end = torch.searchsorted(self.rows, torch.tensor([first, first + count])).tolist()
        return begin, self.rows[begin:end] - first

    def cut(self, numbers: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        """Of rows of the whole, those `kept`, and its columns of them."""
        numbers = numbers if kept is None else numbers[kept.to(numbers.device)]
        return numbers if self.columns is None else numbers[:, self.columns.to(numbers.device)]


def vocabulary_rows(vocabulary: int, size: int) -> int:
    """Rows of embeddings and head that each rank has; the last has some that stand for no token."""
    return -(-vocabulary // size)


def sharded_spec(spec: DecoderSpec, size: int, rank: int = 0, *, whole_experts: bool = False) -> DecoderSpec:
    """What one of `size` ranks runs; ConfigError says what cannot be divided."""
    try:
        layers = [
            replace(layer, mixer=_mixer(layer.mixer, size), feed=_feed(layer, size, rank if whole_experts else None))
            for layer in spec.layers
        ]
    except _Indivisible as error:
        raise ConfigError(f"tensor_parallel {size} cannot divide {spec.architecture}: {error}") from None
    return replace(spec, layers=tuple(layers))


def shards(spec: DecoderSpec, rank: int, size: int, *, whole_experts: bool = False) -> dict[str, Shard]:
    """By module, of those that are not whole; `spec` is that of the whole."""
    rows = vocabulary_rows(spec.vocab_size, size)
    tokens = Shard(torch.arange(rank * rows, min((rank + 1) * rows, spec.vocab_size)))
    found = {"embed": tokens, "head": tokens}
    for index, layer in enumerate(spec.layers):
        cut = _Cut(rank, size, whole_experts)
        for name, shard in (cut.mixer(layer.mixer) | cut.feed(layer, spec.hidden)).items():
            found[f"layers.{index}.{name}"] = shard
    return found


class _Indivisible(Exception):
    pass


def _divided(count: int, size: int, what: str) -> int:
    if count % size:
        raise _Indivisible(f"{count} {what} are not a multiple of it")
    return count // size


def _copied(count: int, size: int, what: str) -> int:
    """Divided, or, where there are fewer than ranks, one on each, several ranks having the same."""
    if count < size and size % count == 0:
        return 1
    return _divided(count, size, what)


def _mixer(mixer: Mixer, size: int) -> Mixer:
    match mixer:
        case Attention():
            heads = _divided(mixer.heads, size, "attention heads")
            return replace(mixer, heads=heads, kv_heads=_copied(mixer.kv_heads, size, "KV heads"))
        case Latent():
            return replace(mixer, heads=_divided(mixer.heads, size, "attention heads"))
        case GatedDelta():
            values = _divided(mixer.value_heads, size, "value heads")
            return replace(mixer, key_heads=_divided(mixer.key_heads, size, "key heads"), value_heads=values)
        case Mamba2():
            groups = _copied(mixer.groups, size, "groups of Mamba heads")
            heads, over_all = _divided(mixer.heads, size, "Mamba heads"), mixer.norm_groups == 1
            norms = 1 if over_all else _divided(mixer.norm_groups, size, "groups of the gated norm")
            return replace(mixer, heads=heads, groups=groups, norm_groups=norms, norm_over_ranks=over_all)
        case ShortConv():
            return replace(mixer, width=_divided(mixer.width, size, "channels of a convolution"))


def _held(count: int, size: int, rank: int) -> range:
    """The experts of an expert-parallel rank; some may have one more than others."""
    return range(rank * count // size, (rank + 1) * count // size)


def _feed(layer: LayerSpec, size: int, whole_experts_of: int | None) -> Dense | Experts | None:
    match layer.feed:
        case Dense() as feed:
            return replace(feed, intermediate=_divided(feed.intermediate, size, "numbers between the MLP's products"))
        case Experts() as feed:
            shared = _divided(feed.shared, size, "numbers between the shared expert's products")
            if whole_experts_of is not None:
                return replace(feed, shared=shared, held=_held(feed.count, size, whole_experts_of))
            inner = _divided(feed.intermediate, size, "numbers between an expert's products")
            return replace(feed, intermediate=inner, shared=shared)
        case _:
            return None


@dataclass(frozen=True)
class _Cut:
    rank: int
    size: int
    whole_experts: bool

    def own(self, count: int) -> torch.Tensor:
        """Of so many heads, channels or numbers, this rank's."""
        if count < self.size:  # several ranks have the same
            return torch.tensor([self.rank * count // self.size])
        share = count // self.size
        return torch.arange(self.rank * share, (self.rank + 1) * share)

    def row_parallel(self, columns: torch.Tensor) -> Shard:
        return Shard(columns=columns, biased=self.rank == 0)

    def mixer(self, mixer: Mixer) -> dict[str, Shard]:
        match mixer:
            case Attention():
                return self._attention(mixer)
            case Latent():
                heads, out = self.own(mixer.heads), mixer.nope_dim + mixer.value_dim
                return {
                    "q_up": Shard(_wide(heads, mixer.rope_dim + mixer.nope_dim)),
                    "kv_up": Shard(_wide(heads, out)),
                    "o": self.row_parallel(_wide(heads, mixer.value_dim)),
                }
            case GatedDelta():
                return self._gated_delta(mixer)
            case Mamba2():
                return self._mamba2(mixer)
            case ShortConv():
                own = self.own(mixer.width)
                stacked = Shard(_stacked((mixer.width, own), (mixer.width, own), (mixer.width, own)))
                return {"in_proj": stacked, "conv": Shard(own), "o": self.row_parallel(own)}

    def _attention(self, mixer: Attention) -> dict[str, Shard]:
        heads, dim = self.own(mixer.heads), mixer.head_dim
        queries, keys = _wide(heads, dim), _wide(self.own(mixer.kv_heads), dim)
        q, kv = (mixer.heads * dim, queries), (mixer.kv_heads * dim, keys)
        found = {
            "qkv": Shard(_stacked(q, *((q,) if mixer.gate else ()), *(kv,) * mixer.kv_parts)),
            "o": self.row_parallel(queries),
            "sinks": Shard(heads),
        }
        return found | ({"q_norm": Shard(queries), "k_norm": Shard(keys)} if mixer.qk_norm == "all" else {})

    def _gated_delta(self, mixer: GatedDelta) -> dict[str, Shard]:
        heads, values = self.own(mixer.key_heads), self.own(mixer.value_heads)
        if mixer.tiled:  # value heads of the key heads that are here, from each tile
            values = torch.arange(mixer.value_heads).view(-1, mixer.key_heads)[:, heads].flatten()
        k = mixer.keys, _wide(heads, mixer.key_dim)
        v, one = (mixer.values, _wide(values, mixer.value_dim)), (mixer.value_heads, values)
        return {
            "qkvz": Shard(_stacked(k, k, v, v)),
            "ba": Shard(_stacked(one, one)),
            "conv": Shard(_stacked(k, k, v)),
            "a_log": Shard(values),
            "dt_bias": Shard(values),
            "o": self.row_parallel(v[1]),
        }

    def _mamba2(self, mixer: Mamba2) -> dict[str, Shard]:
        heads = self.own(mixer.heads)
        inner, one = (mixer.inner, _wide(heads, mixer.head_dim)), (mixer.heads, heads)
        shared = mixer.groups * mixer.state_size, _wide(self.own(mixer.groups), mixer.state_size)
        return {
            "in_proj": Shard(_stacked(inner, inner, shared, shared, one)),
            "conv": Shard(_stacked(inner, shared, shared)),
            **{name: Shard(heads) for name in ("a_log", "dt_bias", "d")},
            "gate_norm": Shard(inner[1]),
            "o": self.row_parallel(inner[1]),
        }

    def feed(self, layer: LayerSpec, hidden: int) -> dict[str, Shard]:
        match layer.feed:
            case Dense() as feed:
                own, parts = self.own(feed.intermediate), 2 if feed.gated else 1
                up = Shard(_stacked(*((feed.intermediate, own),) * parts))
                return {"up": up, "down": self.row_parallel(own)}
            case Experts() as feed:
                own, parts = self.own(feed.intermediate), 2 if feed.gated else 1
                shared = self.own(feed.shared) if feed.shared else own
                up = Shard(_stacked(*((feed.intermediate, own),) * parts * feed.count))
                down = self.row_parallel(own)
                if self.whole_experts:
                    held = torch.tensor(_held(feed.count, self.size, self.rank), dtype=torch.long)
                    up, down = Shard(_wide(held, parts * feed.intermediate)), Shard(_wide(held, hidden))
                return {
                    "experts_up": up,
                    "experts_down": down,
                    "shared_up": Shard(_stacked(*((feed.shared, shared),) * parts)),
                    "shared_down": self.row_parallel(shared),
                }
            case _:
                return {}


def _wide(heads: torch.Tensor, dim: int) -> torch.Tensor:
    """Rows of heads of `dim` rows each."""
    return (heads[:, None] * dim + torch.arange(dim)).flatten()


def _stacked(*parts: tuple[int, torch.Tensor]) -> torch.Tensor:
    """Rows of matrices that are stacked: of each, how many it has and which of them are wanted."""
    begins = torch.tensor([0, *(count for count, _ in parts)]).cumsum(0).tolist()
    return torch.cat([begin + own for begin, (_, own) in zip(begins, parts, strict=False)])


def exchanged_bytes(spec: DecoderSpec, size: int, itemsize: int, *, tokens: int, rows: int, samples: int) -> int:
    """What each of `size` ranks sends in a step of so many tokens in so many rows, where only the last token of each
    row goes on behind the last layer that keeps anything. `spec` is that of the whole, `itemsize` of its numbers."""

    def added(numbers: int, item: int = itemsize) -> int:
        return 2 * (size - 1) * numbers * item // size

    total, hidden = added(tokens * spec.hidden), spec.hidden
    rows = tokens if spec.encoder else rows
    for index, layer in enumerate(spec.layers):
        before, behind = (tokens if index < spec.last_kept + over else rows for over in (1, 0))
        if isinstance(layer.mixer, Attention) and layer.mixer.qk_norm == "all":
            total += added(2 * before, 4)
        if isinstance(layer.mixer, Mamba2) and layer.mixer.norm_groups == 1:
            total += added(before, 4)
        total += added(behind * hidden)
        if layer.feed is not None:
            total += added(behind * hidden) * (2 if isinstance(layer.feed, Experts) and layer.feed.own_norms else 1)
    logits = samples * vocabulary_rows(spec.vocab_size, size) * itemsize
    return total + (size - 1) * (logits + 8 * samples)
