"""Ranks of a model that is divided: whether there can be any with these options, and what each is told.

Refuses to know: processes, how ranks talk.
"""

from __future__ import annotations

import torch

from quire.model.decoder_spec import DecoderSpec
from quire.model.parallel import check_parallel
from quire.runtime.hardware import Hardware, resolve
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError
from quire.types.memory_use import GIB
from quire.types.option_checks import parse_size

HIDDEN_STATE_DRAFTERS = ("medusa", "eagle", "mtp")


def check_ranks(spec: DecoderSpec, options: EngineOptions, hardware: Hardware) -> DecoderSpec:
    """What the first rank runs; ConfigError says why there can be no ranks."""
    size, drafter = options.device.ranks, options.speculation.speculation.partition(":")[0]
    part = check_parallel(spec, options.device)
    if drafter in HIDDEN_STATE_DRAFTERS:
        raise ConfigError(
            f"speculation {drafter} reads the target's embeddings and hidden states, which ranks divide; "
            "take ngram, suffix or draft:MODEL"
        )
    if not hardware.gpu and (options.device.depth or 1) > 1:
        raise ConfigError("depth is 1 for ranks on CPUs: they compute one step at a time, together")
    asked = options.cache.kv_memory
    if not hardware.gpu and asked and parse_size(asked) * size > hardware.memory:
        free = f"the {hardware.memory / GIB:.1f} GiB of memory that are free"
        raise ConfigError(f"kv_memory {asked} for each of {size} ranks is more than {free}; lower it")
    if hardware.gpu and torch.cuda.device_count() < size:
        raise ConfigError(f"{size} ranks take as many GPUs; there are {torch.cuda.device_count()}")
    return part


def rank_options(options: EngineOptions, hardware: Hardware) -> list[EngineOptions]:
    """What each rank is told: a GPU of its own, or its share of the threads."""
    size = options.device.ranks
    if hardware.gpu:
        return [options.but(device=f"cuda:{rank}") for rank in range(size)]
    return [options.but(threads=max(1, resolve(options, hardware).threads // size), device="cpu")] * size
