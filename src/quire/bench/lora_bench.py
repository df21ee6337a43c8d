"""What LoRA costs: the same requests answered by the base model, and by random adapters in turn, one engine for both.

Adapters are written as PEFT would, and loaded as any others are. Refuses to know: how they are computed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire.bench import workloads
from quire.bench.offline import run_workload
from quire.engine.link import Link
from quire.model.decoder_spec import Attention, DecoderSpec, Dense
from quire.types.errors import ConfigError

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
B_SIZE = 0.01  # of random numbers: small, as what is trained is


def shapes(spec: DecoderSpec, layer: int) -> dict[str, tuple[int, int]]:
    """(rows, columns) of a layer's projections, by their names in the block they are of."""
    mixer, feed = spec.layers[layer].mixer, spec.layers[layer].feed
    if not isinstance(mixer, Attention) or not isinstance(feed, Dense) or not feed.gated or mixer.gate:
        raise ConfigError("bench lora makes adapters of models with Llama's projections only")
    queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    attention = {"q_proj": (queries, spec.hidden), "k_proj": (keys, spec.hidden), "v_proj": (keys, spec.hidden)}
    attention["o_proj"] = (spec.hidden, queries)
    mlp = {"gate_proj": (feed.intermediate, spec.hidden), "up_proj": (feed.intermediate, spec.hidden)}
    mlp["down_proj"] = (spec.hidden, feed.intermediate)
    blocks = {f"self_attn.{name}": size for name, size in attention.items()}
    return blocks | {f"mlp.{name}": size for name, size in mlp.items()}


def write_adapter(directory: Path, spec: DecoderSpec, targets: Sequence[str], rank: int, seed: int) -> int:
    """A random adapter; how many numbers it has."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(len(spec.layers)):
        for name, (rows, columns) in shapes(spec, layer).items():
            if name.rpartition(".")[2] in targets:
                module = f"base_model.model.model.layers.{layer}.{name}"
                a, b = torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator)
                tensors[f"{module}.lora_A.weight"] = (a * columns**-0.5).bfloat16()
                tensors[f"{module}.lora_B.weight"] = (b * B_SIZE).bfloat16()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return sum(tensor.numel() for tensor in tensors.values())


@dataclass
class LoraFigures:
    """Output tokens per second, by round."""

    base: list[float] = field(default_factory=list)
    adapters: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of the base's throughput, what is left with adapters: the median of rounds."""
        return statistics.median(b / a for a, b in zip(self.base, self.adapters, strict=True))


def compare(
    link: Link, names: Sequence[str], *, num: int, n_in: int, n_out: int, rounds: int, seed: int
) -> LoraFigures:
    """`num` requests at once, of the base and of the adapters in turn; the first round is not measured."""
    found = LoraFigures()
    for number in range(rounds + 1):
        work = workloads.fixed(num, n_in, n_out, seed=seed + number, vocab=link.info.vocab_size)
        for lora, speeds in (([""], found.base), (names, found.adapters)):
            run = run_workload(link, work, lora=[lora[i % len(lora)] for i in range(num)])
            if number:
                speeds.append(run.stats.output_tokens / run.seconds)
    return found
