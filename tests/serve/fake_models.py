"""A pool of fakes: three models that say their names, of which one may be loaded."""

from __future__ import annotations

import time
from collections.abc import Callable

from fake_frontend import FakeFrontend

from quire.engine.model_pool import ModelPool, PoolLimits
from quire.types.config import EngineOptions
from quire.types.errors import ModelFileError
from quire.types.messages import AdapterInfo
from quire.types.models_file import ServedModel


class Fakes:
    """Opens fakes that say their model's name; counts what it opens."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.frontends: dict[str, FakeFrontend] = {}
        self.broken: set[str] = set()
        self.pool: ModelPool | None = None

    async def open_model(self, model: ServedModel, earlier: object) -> FakeFrontend:
        self.opened.append(model.name)
        if model.name in self.broken:
            raise ModelFileError(f"the file of {model.name} is broken")
        frontend = FakeFrontend()
        frontend.model_name, frontend.says = model.name, f"I am {model.name}."
        if model.name == "b":
            frontend.client.adapters = [AdapterInfo("poet", "poet-files")]
        self.frontends[model.name] = frontend
        return frontend

    async def start(self) -> ModelPool:
        models = [ServedModel(name, EngineOptions()) for name in ("a", "b", "org/c")]
        self.pool = ModelPool(models, self.open_model, PoolLimits(models=1, wait=20.0))  # type: ignore[arg-type]
        await self.pool.start()
        return self.pool

    def idle(self) -> bool:
        assert self.pool is not None
        return all(one.requests == 0 for one in self.pool.states())


def until(true: Callable[[], bool]) -> None:
    """A response may have reached its reader a moment before its request has ended."""
    for _ in range(1000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("it did not come true")
