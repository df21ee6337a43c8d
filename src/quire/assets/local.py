"""A model on this disk: where it is, how to open it, what its headers say about it.

Knows: directories of safetensors, GGUF files. Refuses to know: how a model came to be here.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.assets.gguf_parts import GGUFModel, model_stem, part_paths
from quire.assets.safetensors_reader import SafetensorsModel
from quire.types.errors import ModelFileError, ModelNotFoundError, QuireError
from quire.types.messages import WeightsInfo
from quire.types.seams import WeightSource

Kind = Literal["gguf", "safetensors"]


@dataclass(frozen=True)
class LocalModel:
    """`path` is the file of a GGUF, the first if it is split; the directory of anything else."""

    name: str
    path: Path
    kind: Kind

    def open(self) -> WeightSource:
        """Read and check the headers; raises ModelFileError on the first thing that is wrong."""
        return GGUFModel(self.path) if self.kind == "gguf" else SafetensorsModel(self.path)

    def file(self, name: str) -> Path | None:
        """A file that accompanies the weights, such as tokenizer.json; a GGUF has none."""
        if self.kind == "gguf":
            return None
        path = self.path / Path(name).name
        return path if path.is_file() else None

    def files(self) -> list[Path]:
        found = part_paths(self.path) if self.kind == "gguf" else sorted(self.path.iterdir())
        return [path for path in found if path.is_file()]

    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.files())


@dataclass(frozen=True)
class ModelInfo:
    """What a model's headers say, for people. None: the files do not tell."""

    name: str
    path: Path
    kind: Kind
    size: int
    architecture: str | None = None
    parameters: int | None = None
    context_length: int | None = None
    quantisation: str | None = None
    problem: str = ""  # why the files cannot be read, if they cannot

    def weights(self) -> WeightsInfo:
        """... as an engine tells of it."""
        return WeightsInfo(
            path=str(self.path),
            kind=self.kind,
            bytes=self.size,
            architecture=self.architecture or "",
            parameters=self.parameters or 0,
            context_length=self.context_length or 0,
            quantisation=self.quantisation or "",
        )


def is_here(path: Path) -> bool:
    """Whether there is such a file or directory, or another part of the same split model."""
    return any(part.exists() for part in part_paths(path))


def at_path(path: Path) -> LocalModel:
    """The model in a directory or GGUF file that is here."""
    if not path.is_dir():
        if path.suffix.lower() != ".gguf":
            raise ModelFileError(
                f"{path} is not a GGUF file; give a .gguf file, or the directory of a safetensors model"
            )
        return _gguf(path)
    if (path / "config.json").is_file():
        return LocalModel(path.resolve().name, path, "safetensors")
    files = sorted({part_paths(file)[0] for file in path.glob("*.gguf")})
    if len(files) == 1:
        return _gguf(files[0])
    if files:
        raise ModelNotFoundError(f"{path} holds several models; choose one: {', '.join(str(f) for f in files[:8])}")
    raise ModelNotFoundError(f"{path} holds no model: neither a config.json nor a .gguf file")


def _gguf(path: Path) -> LocalModel:
    return LocalModel(model_stem(path), part_paths(path)[0], "gguf")


def describe(model: LocalModel, source: WeightSource | None = None) -> ModelInfo:
    """Read the headers of one model (`source`, if they were); a broken model is described as broken, not raised."""
    size = model.size()
    try:
        source = source or model.open()
    except QuireError as error:
        return ModelInfo(model.name, model.path, model.kind, size, problem=str(error))
    meta, tensors = source.metadata(), source.tensors().values()
    architecture, context = _from_gguf(meta) if model.kind == "gguf" else _from_config(meta)
    weight: Counter[str] = Counter()
    for info in tensors:
        weight[info.kind] += info.nbytes
    return ModelInfo(
        name=model.name,
        path=model.path,
        kind=model.kind,
        size=size,
        architecture=architecture,
        parameters=sum(math.prod(info.shape) for info in tensors) or None,
        context_length=context if isinstance(context, int) else None,
        quantisation=weight.most_common(1)[0][0] if weight else None,
    )


def _from_gguf(meta: dict[str, Any]) -> tuple[str | None, Any]:
    architecture = meta.get("general.architecture")
    return architecture, meta.get(f"{architecture}.context_length")


def _from_config(config: dict[str, Any]) -> tuple[str | None, Any]:
    names = config.get("architectures") or [config.get("model_type")]
    context = next((config[key] for key in ("max_position_embeddings", "n_positions", "n_ctx") if key in config), None)
    return names[0] if isinstance(names, list) else None, context
