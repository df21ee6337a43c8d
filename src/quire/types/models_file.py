"""Several models of one server: what the YAML file of `--models` says, entry by entry, and how long a model is kept.

    models:
      - name: chat            # what clients call it; the first is the default
        model: qwen3:8b       # hub id, directory or GGUF file, as on the command line
        keep_alive: 10m       # how long it stays loaded while nobody asks it
        max_model_len: 8192   # any option of an engine
        replicas: 2           # engines of it, on Ray; any option of replicas
      - name: embed
        model: org/name-GGUF:Q8_0
        pinned: true          # loaded at start, never unloaded

Refuses to know: where models are, what they need.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire.types.config import EngineOptions, flat_fields
from quire.types.errors import ConfigError
from quire.types.option_checks import Checked, option
from quire.types.option_names import unknown_option
from quire.types.replica_options import ReplicaOptions

MAX_FILE_BYTES = 1 << 20
MAX_MODELS = 256
MAX_DURATION = 64  # characters
OF_ONE_ENGINE = ("kv_disk", "kv_events", "kv_events_replay")  # what no two engines can have
FOR_EVER_S = 100 * 365 * 86400.0  # so long, and longer
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
_DURATION = re.compile(rf"([+-]?)((?:{_NUMBER}(?:ns|us|µs|ms|s|m|h))+|{_NUMBER})", re.ASCII)
_PART = re.compile(rf"({_NUMBER})(ns|us|µs|ms|s|m|h|$)", re.ASCII)


def parse_keep_alive(value: str | float) -> float:
    """Seconds, as Ollama reads them: a number, or Go's durations such as 5m and 1h30m; below 0: for ever."""
    if isinstance(value, str):
        said = value.strip()
        found = _DURATION.fullmatch(said) if len(said) <= MAX_DURATION else None
        if found is None:
            raise ConfigError(f"keep_alive must be seconds, or like 5m or 1h30m, got {value[:MAX_DURATION]!r}")
        seconds = sum(float(number) * _UNITS.get(unit, 1.0) for number, unit in _PART.findall(found[2]))
        value = -seconds if found[1] == "-" else seconds
    if math.isnan(value):
        raise ConfigError("keep_alive must be a number")
    return float(value) if 0 <= value < FOR_EVER_S else math.inf


@dataclass(frozen=True)
class ModelPoolOptions(Checked):
    """Several models."""

    models: str | None = option(
        None,
        "YAML file of several models to serve by name, loaded when asked for; options of engines given beside it are "
        "those of all of them",
        common=True,
    )
    max_loaded_models: int | None = option(
        None, "with models: loaded at once (default: all that models_memory allows)", low=1, high=MAX_MODELS
    )
    models_memory: str | None = option(
        None, "with models: bytes that weights and KV pages of all loaded ones may take together", size=True
    )
    models_asleep: str | None = option(
        None,
        "with models: host memory in which engines that make room for others wait asleep, such as 40G, rather than end",
        size=True,
    )
    keep_alive: str = option(
        "-1", "with models: how long one stays loaded while nobody asks it, such as 5m; -1: until another needs room"
    )
    model_wait: float = option(
        60.0, "with models: seconds that a request waits for others to end before its model can be loaded", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_keep_alive(self.keep_alive)
        for name, field in ModelPoolOptions.__dataclass_fields__.items():
            if self.models is None and getattr(self, name) != field.default:
                raise ConfigError(f"{name} has no effect without models: one model stays loaded")


@dataclass(frozen=True)
class ServedModel:
    """One entry: a model, the name it answers to, and how it is kept."""

    name: str
    engine: EngineOptions
    pinned: bool = False  # loaded at start, never unloaded
    keep_alive: float = math.inf  # seconds without a request after which it is unloaded
    replicas: ReplicaOptions | None = None  # None: one engine of the server's own

    @property
    def most_engines(self) -> int:
        """That it has at any time."""
        return self.replicas.most_replicas if self.replicas is not None else 1


def read_models_file(
    path: str, engine: EngineOptions, keep_alive: float, ray_address: str | None = None
) -> list[ServedModel]:
    """Entries of a file, the default first; each has the options of `engine` and `keep_alive` where it says nothing.
    `ray_address`: where their replicas run."""
    file = Path(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes, which no list of models is")
        found = _decoded(file.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    entries = found.pop("models", None) if isinstance(found, dict) else None
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_MODELS or found:
        raise ConfigError(f"{path} must have one key, models, with a list of 1 to {MAX_MODELS} entries")
    models: list[ServedModel] = []
    for number, entry in enumerate(entries, 1):
        try:
            model = _entry(entry, engine, keep_alive, ray_address)
        except ConfigError as error:
            raise ConfigError(f"{path}, model {number}: {error}") from None
        if any(model.name == other.name for other in models):
            raise ConfigError(f"{path} has two models called {model.name!r}")
        models.append(model)
    for option_name in OF_ONE_ENGINE:
        said = [getattr(model.engine.cache, option_name) for model in models]
        if len(set(said) - {None}) < sum(each is not None for each in said):
            raise ConfigError(f"{option_name} is one engine's: no two models of {path} may have the same")
    return models


def _decoded(data: bytes) -> Any:
    import msgspec.yaml  # reads plain values only: PyYAML's safe loader

    return msgspec.yaml.decode(data)


def _entry(entry: Any, engine: EngineOptions, keep_alive: float, ray_address: str | None) -> ServedModel:
    if not isinstance(entry, dict) or not all(isinstance(key, str) for key in entry):
        raise ConfigError("an entry has options by name, model among them")
    said = dict(entry)
    of_replicas = [field.name for field in dataclasses.fields(ReplicaOptions) if field.name != "ray_address"]
    known = ["name", "pinned", "keep_alive", *of_replicas, *(field.name for field in flat_fields())]
    if strange := [key for key in said if key not in known]:
        raise ConfigError(unknown_option(strange[0], known))
    if not isinstance(said.get("model"), str):
        raise ConfigError("it needs model: a name, hub id, directory or GGUF file")
    name, pinned, kept = said.pop("name", said["model"]), said.pop("pinned", False), said.pop("keep_alive", None)
    if not isinstance(name, str) or not name or len(name) > 256:
        raise ConfigError("name must be text of 1 to 256 characters")
    if not isinstance(pinned, bool):
        raise ConfigError("pinned must be true or false")
    if kept is not None and (isinstance(kept, bool) or not isinstance(kept, str | int | float)):
        raise ConfigError("keep_alive must be seconds, or like 5m or 1h30m")
    if pinned and kept is not None:
        raise ConfigError("keep_alive has no effect beside pinned: it is never unloaded")
    cluster = {key: said.pop(key) for key in of_replicas if key in said}
    replicas = ReplicaOptions(**cluster, ray_address=ray_address) if cluster else None
    options = EngineOptions.of(**(engine.flat() | said))
    kept = keep_alive if kept is None else parse_keep_alive(kept)
    return ServedModel(name, options, pinned, kept, replicas)
