"""Devices that simulations run on: fitted cost models, by name or from a file."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec

from quire.types.cost_model import CostModel, read_cost_model
from quire.types.errors import ConfigError

SHIPPED = ("h200",)


def load_device(name: str) -> CostModel:
    """A device shipped with the package, or a file that `quire bench calibrate` wrote."""
    if name in SHIPPED:
        text = resources.files("quire.simulation").joinpath(f"data/{name}.json").read_bytes()
        return msgspec.json.decode(text, type=CostModel)
    if not Path(name).is_file():
        raise ConfigError(f"a cost model is {' or '.join(SHIPPED)}, or a file of `quire bench calibrate`; got {name!r}")
    return read_cost_model(Path(name))
