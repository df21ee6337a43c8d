"""Whether a model can be divided as the options say, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence

from quire.model.context_parallel import context_bytes, context_spec, own_tokens
from quire.model.decoder_spec import DecoderSpec, Experts
from quire.model.pipeline import staged_spec
from quire.model.sharding import exchanged_bytes, sharded_spec
from quire.types.config import DeviceOptions
from quire.types.errors import ConfigError


def check_parallel(spec: DecoderSpec, options: DeviceOptions, rank: int = 0) -> DecoderSpec:
    """What a rank runs; ConfigError says why the model cannot be divided so."""
    if options.expert_parallel and not any(isinstance(layer.feed, Experts) for layer in spec.layers):
        raise ConfigError(f"expert_parallel has no effect: {spec.architecture} has no experts")
    if options.pipeline_parallel > 1:
        return staged_spec(spec, rank, options.pipeline_parallel)
    if options.context_parallel > 1:
        spec = context_spec(spec, options.context_parallel)
    tensor = options.tensor_parallel
    return sharded_spec(spec, tensor, rank % tensor, whole_experts=options.expert_parallel)


def describe_parallel(spec: DecoderSpec, options: DeviceOptions, itemsize: int, backend: str) -> str:
    """What ranks cost beside what they compute, for people."""
    if options.pipeline_parallel > 1:
        layers = -(-len(spec.layers) // options.pipeline_parallel)
        return (
            f"pipeline parallel: {options.pipeline_parallel} stages of up to {layers} layers by {backend}; "
            f"a stage sends {spec.hidden * itemsize:,} bytes for each token of a step"
        )
    if options.context_parallel > 1:
        size, prompt = options.context_parallel, 2000 * options.context_parallel
        weights = "all weights" if options.tensor_parallel == 1 else f"1/{options.tensor_parallel} of every layer"
        sent = step_bytes(spec, options, itemsize, [(0, prompt)], samples=0) // prompt
        return (
            f"context parallel: {options.ranks} ranks by {backend}, each with {weights} and every {size}. token of a "
            f"KV page; a rank sends {sent:,} bytes for each token of a prompt and "
            f"{step_bytes(spec, options, itemsize, [(1, 1)], samples=1):,} for each token of an answer"
        )
    size = options.tensor_parallel
    token, sample = (exchanged_bytes(spec, size, itemsize, tokens=n, rows=n, samples=1 - n) for n in (1, 0))
    return (
        f"tensor parallel: {size} ranks by {backend}; a rank sends {token:,} bytes for each token of a step and "
        f"{sample:,} for each sample"
    )


def step_bytes(
    spec: DecoderSpec, options: DeviceOptions, itemsize: int, rows: Sequence[tuple[int, int]], *, samples: int
) -> int:
    """What rank 0 of context-parallel ranks sends in a step of rows with so many tokens before them and so many of
    their own: to those that have other tokens, and to those that share its layers."""
    context, tensor = options.context_parallel, options.tensor_parallel
    sent = context_bytes(sharded_spec(spec, tensor), 0, context, itemsize, rows, samples=0)
    tokens = sum(own_tokens(count, 0, context) for _, count in rows)
    sent += exchanged_bytes(spec, tensor, itemsize, tokens=tokens, rows=len(rows), samples=samples)
    return sent + 8 * samples * (options.ranks - tensor)  # what is sampled goes to all
