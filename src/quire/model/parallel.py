"""Whether a model can be divided as the options say, and what that costs."""

from __future__ import annotations

from quire.model.context_parallel import context_bytes, context_spec
from quire.model.decoder_spec import DecoderSpec, Experts
from quire.model.pipeline import staged_spec
from quire.model.sharding import exchanged_bytes, sharded_spec
from quire.types.config import DeviceOptions
from quire.types.errors import ConfigError


def check_parallel(spec: DecoderSpec, options: DeviceOptions) -> DecoderSpec:
    """What rank 0 runs; ConfigError says why the model cannot be divided so."""
    if options.expert_parallel and not any(isinstance(layer.feed, Experts) for layer in spec.layers):
        raise ConfigError(f"expert_parallel has no effect: {spec.architecture} has no experts")
    if options.pipeline_parallel > 1:
        return staged_spec(spec, 0, options.pipeline_parallel)
    if options.context_parallel > 1:
        return context_spec(spec, options.context_parallel)
    return sharded_spec(spec, options.tensor_parallel, whole_experts=options.expert_parallel)


def describe_parallel(spec: DecoderSpec, options: DeviceOptions, itemsize: int, backend: str) -> str:
    """What ranks cost beside what they compute, for people."""
    if options.pipeline_parallel > 1:
        layers = -(-len(spec.layers) // options.pipeline_parallel)
        return (
            f"pipeline parallel: {options.pipeline_parallel} stages of up to {layers} layers by {backend}; "
            f"a stage sends {spec.hidden * itemsize:,} bytes for each token of a step"
        )
    if options.context_parallel > 1:
        size, prompt = options.context_parallel, 2 * options.context_parallel
        sent = context_bytes(spec, 0, size, itemsize, [(0, 1000 * prompt)], samples=0) // (1000 * prompt)
        return (
            f"context parallel: {size} ranks by {backend}, each with all weights and every {size}. token of a KV page; "
            f"a rank sends {sent:,} bytes for each token of a prompt and "
            f"{context_bytes(spec, 0, size, itemsize, [(1, 1)], samples=1):,} for each token of an answer"
        )
    size = options.tensor_parallel
    token, sample = (exchanged_bytes(spec, size, itemsize, tokens=n, rows=n, samples=1 - n) for n in (1, 0))
    return (
        f"tensor parallel: {size} ranks by {backend}; a rank sends {token:,} bytes for each token of a step and "
        f"{sample:,} for each sample"
    )
