"""Options → a running engine. The only module of this room that imports the runtime (and so torch)."""

from __future__ import annotations

import time

from quire.assets import ModelInfo, describe, resolve
from quire.assets.pooling_files import pooling_info
from quire.engine.core import EngineCore
from quire.runtime.executors.local_executor import LocalExecutor
from quire.text import load_tokenizer, vocabulary_of
from quire.types.config import EngineOptions
from quire.types.messages import EngineInfo, WeightsInfo
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams


def build_engine(options: EngineOptions, *, progress: bool = False) -> tuple[EngineCore, EngineInfo]:
    model = resolve(options.model.model, progress=progress)
    source = model.open()
    executor = LocalExecutor(
        options,
        source,
        vocabulary=lambda size: vocabulary_of(load_tokenizer(model), size),
        progress=progress,
    )
    core = EngineCore(options, executor)
    capacity = core.capacity
    about = executor.describe()
    startup_s = about.startup_s | {"first token": first_token(core)}
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in startup_s.items())
    info = EngineInfo(
        model=model.name,
        max_model_len=capacity.longest,
        stream_len=capacity.max_model_len,
        vocab_size=about.vocab_size,
        pages=capacity.pages - 1,
        page_size=options.cache.page_size,
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
        weights=weights_info(describe(model, source)),
        adapters=core.adapters.list(),
        pooling=pooling_info(
            model, source.metadata(), encoder=capacity.whole, labels=about.labels, types=about.token_types
        ),
    )
    return core, info


def weights_info(found: ModelInfo) -> WeightsInfo:
    return WeightsInfo(
        path=str(found.path),
        kind=found.kind,
        bytes=found.size,
        architecture=found.architecture or "",
        parameters=found.parameters or 0,
        context_length=found.context_length or 0,
        quantisation=found.quantisation or "",
    )


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
