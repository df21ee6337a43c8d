"""Drafters: the `speculation` option → a proposer, ready.

Knows: which kinds there are, and what each needs. Refuses to know: how any of them drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

from quire.assets import resolve as find_model
from quire.generation.drafting.head_proposers import EagleProposer, MedusaProposer
from quire.generation.drafting.heads import Heads, MedusaHeads, load_heads
from quire.generation.drafting.mtp import MtpDrafter
from quire.generation.drafting.ngram import NGramProposer, SuffixProposer, SyntheticProposer
from quire.generation.drafting.predicted import PredictedProposer
from quire.generation.drafting.published_heads import PublishedHeads, PublishedMedusaHeads, load_published
from quire.generation.drafting.speculation import Speculation
from quire.generation.grammar.grammar_store import GrammarStore
from quire.kernels.cpu.int8_linear import pack_linears
from quire.model import Runnable, load_model
from quire.model.loading.load import Progress
from quire.model.loading.mtp_layer import MtpLayer, load_mtp
from quire.runtime.draft_model import DraftModelProposer
from quire.runtime.sampling_head import SamplingHead
from quire.runtime.worker import ForwardWorker
from quire.types.config import EngineOptions, SpeculationOptions
from quire.types.errors import ConfigError
from quire.types.kv import KVLayout
from quire.types.plan import Capacity
from quire.types.seams import WeightSource

DRAFT_TOKENS = {  # by default
    "off": 0, "ngram": 8, "suffix": 8, "draft": 4, "medusa": 3, "eagle": 8, "mtp": 2, "synthetic": 4
}  # fmt: skip
PREDICTED_DRAFT_TOKENS = 8  # from a caller's prediction, where nothing else is drafted
TREE_WIDTH = 4  # branches an EAGLE-type drafter follows at every depth


def draft_limit(options: SpeculationOptions) -> int:
    """Longest draft in tokens; 0 where speculation is off."""
    return options.draft_tokens or DRAFT_TOKENS[options.speculation.partition(":")[0]]


@dataclass(frozen=True)
class Drafter:
    """A draft model in memory, and the layout of its pages."""

    model: Runnable
    layout: KVLayout


def load_drafter(
    options: EngineOptions, source: WeightSource, target: Runnable, *, progress: Progress | None = None
) -> Drafter | MtpLayer | None:
    """The draft model, or the target's own layer that drafts, if there is one: before memory is divided, since it takes
    some."""
    return _load_draft_model(options, target, progress) or _load_mtp_layer(options, target, source)


def _load_draft_model(options: EngineOptions, target: Runnable, progress: Progress | None) -> Drafter | None:
    kind, _, name = options.speculation.speculation.partition(":")
    if draft_limit(options.speculation) == 0 or kind != "draft":
        return None
    model = load_model(
        find_model(name).open(),
        device=target.device,
        dtype=target.dtype,
        length=options.model.max_model_len or target.length,
        compiled=target.threads,
        invariant=options.device.invariant,
        progress=progress,
    )
    if model.spec.recurrent:
        raise ConfigError(f"draft model {name!r} has recurrent layers, whose states cannot follow drafts; take another")
    if model.spec.vocab_size != target.spec.vocab_size:
        raise ConfigError(
            f"draft model {name!r} has a vocabulary of {model.spec.vocab_size}, the model it drafts for one of "
            f"{target.spec.vocab_size}; take one with the same tokenizer"
        )
    size = options.cache.page_size * options.device.context_parallel  # whole tokens of the pages that ranks divide
    return Drafter(model, model.spec.kv_layout(page_size=size, dtype=model.kv_dtype))


def _load_mtp_layer(options: EngineOptions, target: Runnable, source: WeightSource) -> MtpLayer | None:
    """The target's own multi-token-prediction layer, if it is to draft."""
    if options.speculation.speculation != "mtp":
        return None
    dtype = torch.float32 if target.threads is not None else target.dtype
    return load_mtp(source, device=target.device, dtype=dtype, length=target.length)


def make_speculation(
    options: SpeculationOptions,
    target: Runnable,
    drafter: Drafter | MtpLayer | None,
    capacity: Capacity,
    grammars: GrammarStore,
    *,
    moves: bool = True,
) -> Speculation | None:
    """`moves`: whether K and V may change their places once they are computed, as trees of drafts have it."""
    kind, _, argument = options.speculation.partition(":")
    if kind == "off":
        return Speculation(PredictedProposer(), predicted_only=True) if capacity.drafts else None
    if kind == "synthetic":
        synthetic = SyntheticProposer(_rate(argument), target.spec.vocab_size)
        return Speculation(synthetic, synthetic.verify)
    if isinstance(drafter, MtpLayer):
        made = MtpDrafter(drafter, target.embeddings)
        return Speculation(PredictedProposer(EagleProposer(made)), hidden_layers=made.layers)
    if drafter is not None:
        model, layout, own = drafter.model, drafter.layout, replace(capacity, drafts=0, depth=capacity.drafts)
        worker = ForwardWorker(model, layout, own, model.device)
        head = SamplingHead(worker, grammars)
        if model.device.type == "cuda":
            worker.capture(beside=[head.warm_up])
        return Speculation(PredictedProposer(DraftModelProposer(worker, head, layout)))
    if kind in ("medusa", "eagle"):
        heads = _heads(kind, argument, target)
        if isinstance(heads, MedusaHeads | PublishedMedusaHeads):
            return Speculation(PredictedProposer(MedusaProposer(heads)), hidden_layers=())
        # On a GPU a step with a tree would have to go without captured kernels, which costs more than branches gain;
        # states of recurrent layers follow one branch only.
        width = TREE_WIDTH if target.device.type == "cpu" and not target.spec.recurrent and moves else 1
        return Speculation(PredictedProposer(EagleProposer(heads, width)), hidden_layers=heads.layers)
    return Speculation(PredictedProposer(NGramProposer() if kind == "ngram" else SuffixProposer()))


def _heads(kind: str, path: str, target: Runnable) -> Heads | PublishedHeads:
    """Of our own training, in one file, or published, in a directory."""
    spec = target.spec
    heads: Heads | PublishedHeads
    facts = {"hidden": spec.hidden, "layers": len(spec.layers), "vocab": spec.vocab_size}
    if Path(path).is_dir():
        dtype = torch.float32 if target.device.type == "cpu" else target.dtype
        heads = load_published(kind, path, **facts, device=target.device, dtype=dtype, embed=target.embeddings)
    else:
        heads = load_heads(kind, path, **facts, device=target.device)
    if target.threads is not None:
        pack_linears(heads)
    return heads


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise ConfigError(f"synthetic speculation takes a rate from 0 to 1, not {text!r}")
    return rate
