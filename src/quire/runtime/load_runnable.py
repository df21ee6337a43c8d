"""Options and what the machine has → the model that runs them, or a tensor-parallel rank's part of it."""

from __future__ import annotations

import torch

from quire.model import Runnable, load_model
from quire.model.decoder_spec import SparseAttention
from quire.model.loading.held_model import WeightMemory
from quire.model.loading.load import Progress
from quire.model.quantization.fp8 import Fp8Scheme
from quire.model.ranks import Ranks
from quire.runtime.hardware import DTYPES, Hardware, Resolved
from quire.runtime.product_search import known_products
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError
from quire.types.sampling_params import least_sparse_pages
from quire.types.seams import WeightSource


def load_runnable(
    options: EngineOptions,
    hardware: Hardware,
    resolved: Resolved,
    source: WeightSource,
    *,
    ranks: Ranks | None = None,
    held: WeightMemory | None = None,
    progress: Progress | None = None,
) -> Runnable:
    """torch computes on as many threads as were resolved, unless the model has its own."""
    cache = options.cache
    if hardware.gpu and cache.sparse_pages:
        raise ConfigError("sparse_pages is for CPUs: on a GPU attention reads all pages")
    if 0 < cache.sparse_pages < least_sparse_pages(cache.page_size):
        least = least_sparse_pages(cache.page_size)
        raise ConfigError(f"sparse_pages must be 0 or at least {least} with pages of {cache.page_size} tokens")
    device = torch.device(resolved.device)
    if hardware.gpu:
        known_products(device)
    else:
        torch.set_num_threads(resolved.threads)
    model = load_model(
        source,
        device=device,
        dtype=DTYPES[resolved.dtype],
        random_weights=options.model.random_weights,
        length=options.model.max_model_len,
        compiled=resolved.threads if options.model.dtype == "auto" and not hardware.gpu else None,
        quantize=resolved.quantize,
        scheme=Fp8Scheme() if resolved.fp8 else None,
        invariant=options.device.invariant,
        sparse=None
        if hardware.gpu or resolved.kv_residual or options.device.context_parallel > 1
        else SparseAttention(cache.sparse_attention, cache.sparse_pages),
        ranks=ranks,
        held=held,
        progress=progress,
    )
    if model.threads is not None:
        torch.set_num_threads(1)  # the decoder has its own; torch's would spin on its cores after every draw
    return model
