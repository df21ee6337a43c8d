"""Options → a running engine. The only module of this room that imports the runtime (and so torch)."""

from __future__ import annotations

import importlib
import pkgutil
import socket
import time
from collections.abc import Callable

import torch

from quire.assets import LocalModel, Preview, describe, present, preview, pull, resolve
from quire.assets.pooling_files import pooling_info
from quire.engine.core import EngineCore
from quire.kernels import triton
from quire.runtime.executors.open_executor import open_executor
from quire.runtime.held_weights import HolderLink
from quire.runtime.model_fit import ModelFit, misfit, model_fit, other_forms
from quire.text import load_tokenizer, vocabulary_of
from quire.types.config import CacheOptions, EngineOptions
from quire.types.errors import ConfigError, ModelFileError, ModelNotFoundError
from quire.types.messages import EngineInfo
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

Tell = Callable[[Preview, ModelFit | None], None]


def fetch_model(options: EngineOptions, *, progress: bool = True, tell: Tell | None = None) -> LocalModel:
    """The model on this disk. One that is not here yet is fetched once its headers say that it runs here and fits;
    `tell` hears what they say before that."""
    name = options.model.model
    if (model := present(name)) is not None:
        return model
    found = preview(name)
    if found is None:
        return resolve(name, progress=progress)  # says what there is instead
    fit = check_preview(found, options)
    if tell is not None:
        tell(found, fit)
    if fit is not None and found.source is not None and not fit.fits:
        raise ConfigError(
            f"{name}: {misfit(found.source, options, fit)}. Nothing was fetched; `quire pull {name}` would all the same"
        )
    return pull(name, progress=progress)


def check_preview(found: Preview, options: EngineOptions) -> ModelFit | None:
    """How a model that is not here would fit; raises where it could not be loaded or kept. None: its headers cannot be
    had."""
    if found.source is None:
        return None
    if found.missing > found.disk:
        raise ModelNotFoundError(
            f"{found.name} has {found.missing / 1e9:.1f} GB to fetch, and the disk {found.disk / 1e9:.1f} GB of room; "
            "make room, or set QUIRE_CACHE to a folder on another disk"
        )
    try:
        if found.problem:
            raise ModelFileError(found.problem)
        return model_fit(found.source, options)
    except ModelFileError as error:
        instead = other_forms(found.source)
        own = ", ".join(f"{found.name}:{quant}" for quant in found.other if quant != found.name)
        would = f"; {instead}" + (f" (here: {own})" if own else "") if instead else ""
        raise ModelFileError(f"{found.name} cannot be loaded: {error}{would}. Nothing was fetched") from error


def build_engine(
    options: EngineOptions, *, progress: bool = False, holder: socket.socket | None = None
) -> tuple[EngineCore, EngineInfo]:
    """`holder`: the way to who holds weights that outlast this process."""
    model = fetch_model(options, progress=progress)
    link = None if holder is None else HolderLink(holder, model.files())
    source = model.open()
    executor = open_executor(
        options,
        source,
        vocabulary=lambda size: vocabulary_of(load_tokenizer(model), size),
        holder=link,
        progress=progress,
    )
    core = EngineCore(options, executor)
    capacity = core.capacity
    about = executor.describe()
    startup_s = about.startup_s | {"first token": first_token(core)}
    if options.cache.kv_events is not None:
        publish_kv_events(core, options.cache, about.device)
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in startup_s.items())
    info = EngineInfo(
        model=model.name,
        max_model_len=capacity.longest,
        stream_len=capacity.max_model_len,
        vocab_size=about.vocab_size,
        pages=capacity.pages - 1,
        page_size=options.cache.page_size * options.device.context_parallel,
        max_batch_tokens=capacity.max_batch_tokens,
        depth=capacity.depth,
        device=about.device,
        dtype=about.dtype,
        reasons=[*about.reasons, f"start-up: {stages}"],
        slots=capacity.slots,
        priorities=core.scheduler.policy.uses_priority,
        kv_dtype=executor.layout.dtype,
        prefix_cache=options.cache.prefix_cache,
        sparse=about.sparse,
        weights=describe(model, source).weights(),
        adapters=core.adapters.list(),
        pooling=pooling_info(
            model, source.metadata(), encoder=capacity.whole, labels=about.labels, types=about.token_types
        ),
    )
    return core, info


def import_kernels() -> None:
    """What engines import only where there is a GPU; takes none of its memory."""
    if torch.cuda.is_available() and triton.why_not(torch.device("cuda")) is None:
        for module in pkgutil.iter_modules(triton.__path__, f"{triton.__name__}."):
            importlib.import_module(module.name)


def publish_kv_events(core: EngineCore, options: CacheOptions, device: str) -> None:
    from quire.engine.kv_event_publisher import KVEventPublisher  # ZMQ is not needed without it

    assert options.kv_events is not None
    medium = "CPU" if device == "cpu" else "GPU"
    publisher = KVEventPublisher(
        options.kv_events, replay=options.kv_events_replay, topic=options.kv_events_topic, medium=medium
    )
    core.scheduler.memory.tell_of_pages(publisher)
    core.beside.append(publisher)


def first_token(core: EngineCore) -> float:
    """Seconds to draw one, or to compute one: what is loaded or compiled at first use is so now, not under the first
    request."""
    began = time.perf_counter()
    pooling = "cls" if core.capacity.whole else ""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    core.submit(Request(id="first", prompt=[0], params=params, pooling=pooling))
    while core.busy:
        core.step()
    core.reset()
    return time.perf_counter() - began
