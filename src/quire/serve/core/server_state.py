"""What the routes of one server share, and which of its models the request being handled is for.

Refuses to know: JSON, HTTP, how models are loaded and kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from quire.engine.frontend import Frontend
from quire.engine.model_pool import Lease, ModelPool
from quire.observe.ledger import Ledger
from quire.observe.metrics import Metrics
from quire.serve.core.api_keys import KeyRing
from quire.serve.core.background_lanes import Lanes
from quire.serve.core.context import Context, current
from quire.serve.core.loop_lag import LagMonitor
from quire.serve.core.prepare_pool import PreparePool
from quire.serve.core.rate_limits import RequestAdmission
from quire.types.errors import EngineDeadError, InputError, ModelNotFoundError
from quire.types.serving import ServeOptions

logger = logging.getLogger("quire.serve")


class KeptElsewhere(Exception):
    """A request that came to an API worker needs what the main process keeps; `body` is that of the request."""

    def __init__(self, body: bytes):
        super().__init__("the main process keeps what this request needs")
        self.body = body


class OtherProcesses(Protocol):
    """The API workers of a server, as its main process tells of them."""

    @property
    def up(self) -> int:
        """How many answer now."""
        ...

    @property
    def restarts(self) -> int: ...

    @property
    def preparing(self) -> int:
        """Requests being prepared there."""
        ...

    async def refresh(self) -> None:
        """Have all that they counted until now counted here."""
        ...


@dataclass(frozen=True)
class Serving:
    """What the routes of one server share. In a server with API workers the main process has the `workers`, and each
    worker (`is_worker`) another that knows the requests it answers itself."""

    models: ModelPool
    metrics_by_model: Mapping[str, Metrics]
    ledger: Ledger
    options: ServeOptions
    keys: KeyRing
    admission: RequestAdmission
    prepare_pool: PreparePool
    lanes: Lanes
    lag: LagMonitor
    created: int
    workers: OtherProcesses | None = None
    is_worker: bool = False

    @property
    def max_body(self) -> int:
        return self.options.body_bytes

    def need_store(self, body: bytes) -> None:
        """For requests that need what is kept for callers: in a worker the main process answers them."""
        if self.is_worker:
            raise KeptElsewhere(body)

    async def refresh(self) -> None:
        """Have what other processes of this server counted until now counted here."""
        if self.workers is not None:
            await self.workers.refresh()

    @property
    def frontend(self) -> Frontend:
        """Of the model that the request being handled is for; of the default where it has named none yet."""
        lease = current().lease
        return self.models.default if lease is None else lease.frontend

    @property
    def metrics(self) -> Metrics:
        return self.metrics_by_model[self.frontend.model_name]

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.frontend)

    @property
    def model_name(self) -> str:
        """Who answers the request being handled: the model, or one of its adapters."""
        return current().lora or self.frontend.model_name

    def find_model(self, name: str | None) -> tuple[str, str]:
        """The model that a name means (none: the default) and its adapter, which answers by its own name, or behind the
        model's (base:adapter); empty: the model itself."""
        found = self.models.find(name)
        if found is None:
            here = [each for base in self.models.names for each in (base, *self.adapter_names(base))]
            there = ", ".join(map(repr, here))
            raise ModelNotFoundError(f"no model {name!r} here; this server has {there}")
        return found

    def adapter_names(self, model: str) -> list[str]:
        return [one.name for one in self.models.adapters(model)]

    async def use_model(self, name: str | None, *, engine: bool = True) -> None:
        """Have the request being handled answered by the model that it names, loaded if need be, and held until the
        answer has ended. Without `engine` its text will do, which outlives an unloaded one."""
        context = current()
        model, context.lora = self.find_model(name)
        if self.models.single_model or (context.lease is not None and context.lease.model == model):
            return
        context.release_model()
        if not engine and (known := self.models.latest(model)) is not None:
            context.lease = Lease(model, known)
            return
        context.lease = self.models.acquire_loaded(model)
        if context.lease is None:
            waiting = self._wait_for(model, context)
            await (waiting if context.until_gone is None else context.until_gone(waiting))
        self.metrics_by_model[model].info = self.frontend.client.info
        if (trouble := self.frontend.client.trouble()) is not None:
            raise EngineDeadError(trouble)

    def loaded(self, name: str | None) -> Frontend:
        """Of the model that a name means, if it is loaded: for those who only look."""
        model = self.find_model(name)[0]
        frontend = self.models.loaded().get(model)
        if frontend is None:
            raise InputError(f"model {model!r} is not loaded", param="model")
        return frontend

    async def _wait_for(self, model: str, context: Context) -> None:
        began = time.perf_counter()
        try:
            context.lease = await self.models.acquire(model)
        except asyncio.CancelledError:
            fields = {"key": context.key.name, "model": model, "seconds": round(time.perf_counter() - began, 4)}
            logger.info("request cancelled", extra={"fields": fields})  # the ledger knows those that have their model
            raise

    def check_entry(self) -> None:
        """Raises where no work could be done now, whichever model it is for."""
        if self.models.single_model and (trouble := self.models.trouble()) is not None:
            raise EngineDeadError(trouble)


def fingerprint(frontend: Frontend) -> str:
    """Equal as long as what computes the answers is equal: the model, its precision and its device."""
    info = frontend.client.info
    facts = f"{frontend.model_name}|{info.model}|{info.dtype}|{info.device}|{info.vocab_size}"
    return "fp_" + hashlib.sha256(facts.encode()).hexdigest()[:12]
