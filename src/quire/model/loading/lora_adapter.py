"""LoRA adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors → updates of a model's matrices.

What would silently compute something else is refused: DoRA, modules saved whole, embeddings, biases, experts. Refuses
to know: where adapters are kept, who uses them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.assets.json_files import read_json
from quire.assets.safetensors_reader import SafetensorsFile
from quire.model.blocks.low_rank import Update
from quire.model.decoder import Model
from quire.model.decoder_spec import DecoderSpec
from quire.model.families.architecture import Architecture, Target
from quire.model.loading.stored_tensor import StoredTensor
from quire.types.errors import ModelFileError
from quire.types.seams import TensorInfo

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>A|B)(?:\.default)?\.weight")
_REFUSED = {  # fields of the config that change what is computed
    "use_dora": "DoRA (a magnitude beside each matrix)",
    "modules_to_save": "modules that were trained whole (modules_to_save)",
    "lora_bias": "biases in its updates (lora_bias)",
    "layer_replication": "layers that occur several times (layer_replication)",
    "target_parameters": "updates of experts (target_parameters)",
    "trainable_token_indices": "embeddings of single tokens (trainable_token_indices)",
    "alora_invocation_tokens": "an activation by invocation tokens (aLoRA)",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
}


@dataclass(frozen=True)
class LoraAdapter:
    updates: dict[str, dict[int, Update]]  # by module, as `Target` names them, and part of it; float32
    rank: int  # the largest
    digest: str  # of all that it computes: equal where KV is interchangeable


def read_adapter(path: str, family: Architecture, spec: DecoderSpec) -> LoraAdapter:
    """The adapter in a directory, checked against the model it is for."""
    directory = Path(path)
    if not (directory / CONFIG).is_file():
        raise ModelFileError(f"{path} holds no LoRA adapter: there is no {CONFIG}")
    if not (directory / WEIGHTS).is_file():
        pickled = "a pickle (adapter_model.bin), which is never read here; save it as safetensors"
        why = pickled if (directory / "adapter_model.bin").is_file() else f"no {WEIGHTS}"
        raise ModelFileError(f"the weights of the LoRA adapter in {path} are {why}")
    reader = _Reader(read_json(directory / CONFIG), SafetensorsFile(directory / WEIGHTS), family, spec)
    try:
        return reader.adapter()
    except ModelFileError as error:
        raise ModelFileError(f"the LoRA adapter in {path} cannot be used: {error}") from None


def adapter_rank(path: str) -> int:
    """The largest rank that an adapter's config names; 0 if it names none (what is wrong with it, loading says)."""
    if not (Path(path) / CONFIG).is_file():
        return 0
    config = read_json(Path(path) / CONFIG)
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    return max((rank for rank in ranks if isinstance(rank, int)), default=0)


class _Reader:
    def __init__(self, config: Mapping[str, Any], file: SafetensorsFile, family: Architecture, spec: DecoderSpec):
        self._config = config
        self._file = file
        self._family = family
        self._spec = spec
        self._linears = Model(spec, device=torch.device("meta"), dtype=torch.float32).adaptable()

    def adapter(self) -> LoraAdapter:
        self._check_config()
        sides: dict[str, dict[str, TensorInfo]] = {}
        for name, info in self._file.tensors.items():
            match = _TENSOR.fullmatch(name)
            if match is None:
                raise ModelFileError(f"it holds {name!r}, which is no update of a linear layer")
            sides.setdefault(match["module"], {})[match["side"]] = info
        if not sides:
            raise ModelFileError("it has no tensors")
        updates: dict[str, dict[int, Update]] = {}
        digest, rank = hashlib.blake2b(digest_size=16), 0
        for module, pair in sorted(sides.items()):
            if set(pair) != {"A", "B"}:
                raise ModelFileError(f"of {module!r} there is only lora_{min(pair)}")
            target, (a, b) = self._target(module), self._update(module, pair["A"], pair["B"])
            self._place(updates, module, target, a, b)
            rank = max(rank, a.shape[0])
            digest.update(repr((target.module, target.part, tuple(a.shape), tuple(b.shape))).encode())
            digest.update(a.numpy().tobytes() + b.numpy().tobytes())
        return LoraAdapter(updates, rank, digest.hexdigest())

    def _check_config(self) -> None:
        config = self._config
        if config.get("peft_type") != "LORA":
            raise ModelFileError(f"its peft_type is {config.get('peft_type')!r}, only LORA is known")
        for field, what in _REFUSED.items():
            if config.get(field):
                raise ModelFileError(f"it has {what}, which is not supported")
        if config.get("bias", "none") != "none":
            raise ModelFileError(f"it has trained biases (bias {config['bias']!r}), which is not supported")

    def _target(self, module: str) -> Target:
        target = self._family.target(f"{module}.weight", self._spec)
        if target is not None and "expert" in target.module:
            raise ModelFileError(f"it updates experts ({module}), which is not supported")
        if target is None or target.module not in self._linears:
            raise ModelFileError(
                f"it updates {module!r}; of {self._spec.architecture}, only projections of attention and of dense MLPs "
                "can have updates"
            )
        return target

    def _update(self, module: str, a: TensorInfo, b: TensorInfo) -> Update:
        rank, alpha = self._number("rank_pattern", "r", module), self._number("alpha_pattern", "lora_alpha", module)
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise ModelFileError(f"{module!r} should be of rank {rank:g}, its tensors are {a.shape} and {b.shape}")
        scale = alpha / math.sqrt(rank) if self._config.get("use_rslora") else alpha / rank
        found = []
        for info, factor in ((a, 1.0), (b, scale)):
            numbers = torch.empty(info.shape)
            StoredTensor(info, self._file.read(info.name)).copy_into(numbers)
            if not numbers.isfinite().all():
                raise ModelFileError(f"tensor {info.name!r} holds numbers that are not finite")
            found.append(numbers * factor)
        return found[0], found[1]

    def _number(self, pattern: str, usual: str, module: str) -> float:
        """A module's rank or alpha: by the first pattern that its name ends with, as in PEFT, or the usual one."""
        patterns = self._config.get(pattern) or {}
        keys = (key for key in patterns if re.match(rf"(.*\.)?({key})$", module))
        value = patterns[key] if (key := next(keys, None)) is not None else self._config.get(usual)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ModelFileError(f"{usual} of {module!r} should be a positive number, got {value!r}")
        return value

    def _place(
        self, updates: dict[str, dict[int, Update]], module: str, target: Target, a: torch.Tensor, b: torch.Tensor
    ) -> None:
        """The parts of a stacked matrix that an update covers (one of them, or all): B is cut, A shared."""
        linear, row = self._linears[target.module], 0
        if a.shape[1] != linear.columns:
            raise ModelFileError(f"lora_A of {module!r} takes {a.shape[1]} inputs, the model has {linear.columns}")
        rows = b if target.order is None else b[target.order.index(b.shape[0])]
        parts = updates.setdefault(target.module, {})
        for part in range(target.part, len(linear.parts)):
            if row >= b.shape[0]:
                break
            size = linear.parts[part]
            parts[part] = a, rows[row : row + size].contiguous()
            row += size
        if row != b.shape[0]:
            raise ModelFileError(f"lora_B of {module!r} has {b.shape[0]} outputs, which are no parts of the model's")
