"""Quantised matrices as compressed-tensors keep them, in safetensors files of bounded size beside the config.

A checkpoint appears under its name when it is complete. Refuses to know: how numbers were chosen.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire.model.calibration.recipe import Recipe
from quire.model.calibration.weight_rounding import Rounded
from quire.types.errors import ConfigError

SHARD_BYTES = 2 << 30
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_LEFT_OUT = ("config.json", "model.safetensors.index.json")
FORMATS = {"awq": "pack-quantized", "gptq": "pack-quantized", "smoothquant": "int-quantized", "fp8": "float-quantized"}


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers of `bits` (which divide 32) [rows, count] → int32 words, the low bits first."""
    each = 32 // bits
    padded = torch.nn.functional.pad(numbers.to(torch.int64), (0, -numbers.shape[1] % each))
    words = (padded.unflatten(1, (-1, each)) << torch.arange(0, 32, bits, device=numbers.device)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


class CheckpointWriter:
    def __init__(self, out: Path, recipe: Recipe):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} exists and is not an empty folder; name another, or remove it")
        self._out = out
        self._scratch = out.with_name(f".{out.name}.unfinished")
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        self._recipe = recipe
        self._waiting: dict[str, torch.Tensor] = {}
        self._shards: list[list[str]] = []
        self._groups: defaultdict[int, set[str]] = defaultdict(set)  # size → last parts of modules' names
        self._ignored: list[str] = []
        self.nbytes = 0

    def plain(self, name: str, tensor: torch.Tensor) -> None:
        self._waiting[name] = tensor.contiguous().cpu()
        self.nbytes += tensor.nbytes
        if sum(each.nbytes for each in self._waiting.values()) >= SHARD_BYTES:
            self._flush()

    def ignored(self, name: str) -> None:
        """A matrix that is not quantised."""
        self._ignored.append(name.removesuffix(".weight"))

    def matrix(self, name: str, rounded: Rounded, scale_dtype: torch.dtype) -> None:
        before, recipe = name.removesuffix(".weight"), self._recipe
        self._groups[rounded.group if recipe.grouped else 0].add(before.rpartition(".")[2])
        self.plain(f"{before}.weight_scale", rounded.scales.to(scale_dtype))
        if recipe.scheme == "fp8":
            return self.plain(name, rounded.numbers)
        if not recipe.grouped:
            return self.plain(name, (rounded.numbers.short() - 128).to(torch.int8))
        self.plain(f"{before}.weight_packed", packed(rounded.numbers, recipe.bits))
        self.plain(f"{before}.weight_shape", torch.tensor(rounded.numbers.shape))
        if not recipe.symmetric:
            assert rounded.zeros is not None
            self.plain(f"{before}.weight_zero_point", packed(rounded.zeros.t(), recipe.bits).t())
        return None

    def finish(self, source: Path, config: dict[str, Any]) -> None:
        """`source`: where tokenizer and chat template are."""
        self._flush()
        count = len(self._shards)
        index: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            shard = f"model-{number + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
            (self._scratch / f"shard-{number}").rename(self._scratch / shard)
            index |= dict.fromkeys(names, shard)
        if count > 1:
            told = {"metadata": {"total_size": self.nbytes}, "weight_map": index}
            (self._scratch / "model.safetensors.index.json").write_text(json.dumps(told, indent=1))
        for path in source.iterdir():
            if path.is_file() and path.suffix in _COPIED and path.name not in _LEFT_OUT:
                shutil.copyfile(path, self._scratch / path.name)
        written = config | ({"quantization_config": self._config()} if self._groups else {})
        (self._scratch / "config.json").write_text(json.dumps(written, indent=2))
        if self._out.exists():
            self._out.rmdir()
        self._scratch.rename(self._out)

    def abandon(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _flush(self) -> None:
        if self._waiting:
            save_file(self._waiting, self._scratch / f"shard-{len(self._shards)}", metadata={"format": "pt"})
            self._shards.append(list(self._waiting))
            self._waiting = {}

    def _config(self) -> dict[str, Any]:
        form = FORMATS[self._recipe.scheme]
        groups = {
            f"group_{number}": {
                "targets": ["Linear"] if len(self._groups) == 1 else [f"re:.*[.]{last}$" for last in sorted(names)],
                "weights": self._weights(size),
                "input_activations": self._activations(),
                "output_activations": None,
                "format": form,
            }
            for number, (size, names) in enumerate(sorted(self._groups.items(), reverse=True))
        }
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "ignore": ["lm_head", *sorted(self._ignored)],
            "config_groups": groups,
        }

    def _weights(self, group: int) -> dict[str, Any]:
        recipe = self._recipe
        return {
            "num_bits": recipe.bits,
            "type": "float" if recipe.scheme == "fp8" else "int",
            "symmetric": recipe.symmetric,
            "strategy": "group" if group else "channel",
            "group_size": group or None,
            "actorder": "static" if recipe.ordered else None,
            "dynamic": False,
        }

    def _activations(self) -> dict[str, Any] | None:
        if self._recipe.grouped:
            return None
        kind = "float" if self._recipe.scheme == "fp8" else "int"
        return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
