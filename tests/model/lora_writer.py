"""Random LoRA adapters as PEFT writes them, and what merging one into a model's weights gives, by PEFT's formula."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def linears(model: torch.nn.Module, targets: tuple[str, ...]) -> dict[str, torch.nn.Module]:
    return {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in targets}


def write_adapter(
    directory: Path,
    model: torch.nn.Module,
    targets: tuple[str, ...] = ATTENTION + MLP,
    *,
    r=4,
    seed=0,
    size=0.3,
    **config,
) -> Path:
    """An adapter of a transformers model whose B is not zero."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": r, "lora_alpha": 8, "target_modules": list(targets)} | config
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in linears(model, targets).items():
        rows, columns = module.weight.shape if not hasattr(module, "nf") else module.weight.shape[::-1]
        rank = next((n for key, n in config.get("rank_pattern", {}).items() if re.match(rf"(.*\.)?({key})$", name)), r)
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * size
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * size
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merge(model: torch.nn.Module, directory: Path) -> None:
    """W += B A * scaling in place."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    modules = dict(model.named_modules())

    def pattern(field, usual, name):
        found = (n for key, n in config.get(field, {}).items() if re.match(rf"(.*\.)?({key})$", name))
        return next(found, config[usual])

    for key, a in tensors.items():
        if "lora_A" not in key:
            continue
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        rank, alpha = pattern("rank_pattern", "r", name), pattern("alpha_pattern", "lora_alpha", name)
        scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        update = tensors[key.replace("lora_A", "lora_B")] @ a * scale
        weight = modules[name].weight
        weight.data += update if not hasattr(modules[name], "nf") else update.T
