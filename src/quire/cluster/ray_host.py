"""Replicas as Ray Serve applications: Ray places them, looks whether they are well, and starts them again.

    Serve controller ──health──► EngineReplica (actor) ──beats── engine process ──► the client's hub

Each replica is an application of its own with one deployment of one actor, so that it is known which one is ended where
there are to be fewer. Requests and tokens never pass through Ray: the engine process joins the client's hub itself.
Without an address a Ray of this server's own is started on this machine, with a token that nobody else has, listening
on its loopback interface only. Refuses to know: requests, routing.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from quire.cluster.engine_replica import EngineReplica
from quire.cluster.gcs_watch import GcsWatch
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError
from quire.types.membership import ReplicaMembership

log = logging.getLogger(__name__)

INSTALL = "replicas run on Ray, which is not installed; install it with: pip install 'quire[ray]'"
HEALTH_PERIOD_S = 1.0
HEALTH_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 5.0
REACH_TIMEOUT_S = 10.0  # for a cluster's head node to take a connection
CALL_POLL_S = 0.5  # between looks whether Ray is there, while a call of it is waited for
CLOSE_TIMEOUT_S = 60.0  # that replicas of others have to end before Ray does
OBJECT_STORE_BYTES = 80 << 20  # Ray's least: nothing of ours goes through it
# What makes a Ray of one machine listen on its loopback interface only (named for where that is the default), and not
# serve its own metrics, for which it wants no token; and what lets its processes live on without their control process
# while requests are finished.
LOCAL_ONLY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_enable_metrics_collection": "false",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "120",
}
OWN_GCS_PATIENCE_S = 3.0  # one that this server has started does not come back
GCS_PATIENCE_S = 20.0  # of the 60 s after which processes of a cluster end without it


class RaySession:
    """The connection of this process to Ray, of which there is one at a time; ends when those that use it have."""

    def __init__(self, address: str | None):
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(INSTALL)
        self.local = address is None
        self.starting = threading.Lock()  # Ray Serve itself, once
        self._token = tempfile.TemporaryDirectory(prefix="quire-ray-") if self.local else None
        self._hosts = 0
        self._left = threading.Condition()
        self._closed = False
        self.lost = ""  # why there is no Ray any more
        self._on_lost: list[Callable[[str], None]] = []
        self.ray = _connect(address, Path(self._token.name) if self._token else None)
        self.node_address = "127.0.0.1" if self.local else self.ray.util.get_node_ip_address()
        patience_s = OWN_GCS_PATIENCE_S if self.local else GCS_PATIENCE_S
        self._gcs = GcsWatch(self.ray.get_runtime_context().gcs_address, patience_s, self._lose)

    def when_lost(self, told: Callable[[str], None]) -> None:
        """What to call, in a thread, when Ray is there no more."""
        with self._left:
            self._on_lost.append(told)
            lost = self.lost
        if lost:
            told(lost)

    def _lose(self, why: str) -> None:
        with self._left:
            self.lost = why
            every = list(self._on_lost)
        for told in every:
            told(why)

    def join(self) -> None:
        """Somebody uses it."""
        with self._left:
            self._hosts += 1

    def leave(self) -> None:
        with self._left:
            self._hosts -= 1
            self._left.notify_all()

    def close(self) -> None:
        """Waits for those that use it; a second time does nothing."""
        with self._left:
            self._left.wait_for(lambda: not self._hosts, CLOSE_TIMEOUT_S)
            if self._closed:
                return
            self._closed = True
        self._gcs.close()
        self.ray.shutdown()
        if self._token is not None:
            self._token.cleanup()


class RayHost:
    """The applications of one model's replicas."""

    def __init__(self, session: RaySession, name: str, *, shared: bool = False):
        """`name`: of the model among others on the same cluster; what was left behind there by that name is replaced.
        `shared`: the session outlasts it."""
        self._session = session
        self._shared = shared
        self._local = session.local
        self._stopped = False
        self._calls = 0  # of Ray under way, in whatever threads
        self._ended = threading.Condition()  # ... one of them
        self._bind: Callable[[int], Any] | None = None  # the application of a replica
        self._name = "quire-" + re.sub(r"[^A-Za-z0-9_-]+", "-", name)
        self._ray = session.ray
        self.node_address = session.node_address
        self.when_lost = session.when_lost
        session.join()

    def start(
        self,
        replicas: int,
        most: int,
        hub: str,
        member: ReplicaMembership,
        options: EngineOptions,
        *,
        cpus: float,
        gpus: float | None,
        hang_timeout: float,
    ) -> None:
        """Deploy so many, and no more than `most` later; they join the hub when they are ready, which is not waited for
        here."""
        from ray import serve

        there = self._ray.cluster_resources()
        if gpus is None:
            gpus = 0.0 if options.device.device == "cpu" else min(1.0, there.get("GPU", 0.0) / most)
        for name, each in (("GPU", gpus), ("CPU", 0.0 if self._local else cpus)):
            if each * replicas > there.get(name, 0.0):
                have = f"the Ray cluster has {there.get(name, 0.0):g}"
                raise ConfigError(f"{replicas} replicas with {each:g} {name} each need more than {have}")
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        plain: Any = serve.deployment(EngineReplica)
        deployment = plain.options(
            name="replica",
            num_replicas=1,
            health_check_period_s=HEALTH_PERIOD_S,
            health_check_timeout_s=HEALTH_TIMEOUT_S,
            graceful_shutdown_timeout_s=SHUTDOWN_TIMEOUT_S,
            ray_actor_options={"num_cpus": 0.0 if self._local else cpus, "num_gpus": gpus},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        self._bind = lambda number: deployment.bind(
            number, hub, msgspec.json.encode(member), options.flat(), hang_timeout
        )
        with self._calling() as here:  # so that an end that comes meanwhile finds what was deployed
            if here:
                self._deploy(replicas)

    def _deploy(self, replicas: int) -> None:
        from ray import serve

        with self._session.starting:
            serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        if not self._local:
            self._delete_all()
        self._run(range(replicas))

    def _run(self, numbers: Iterable[int]) -> None:
        from ray import serve

        assert self._bind is not None
        targets = [
            serve.RunTarget(target=self._bind(number), name=self._application(number), route_prefix=None)
            for number in numbers
        ]
        serve.run_many(targets, wait_for_applications_running=False)

    def _application(self, number: int) -> str:
        return f"{self._name}-replica-{number}"

    def start_replica(self, number: int) -> None:
        """Deploy one more."""
        with self._calling() as there:
            if there:
                self._run([number])

    def stop_replica(self, number: int) -> None:
        """Returns when it is gone."""
        from ray import serve

        with self._calling() as there:
            if there:
                serve.delete(self._application(number))

    @contextmanager
    def _calling(self) -> Iterator[bool]:
        """Whether Ray is there; it stays so long. A call after its end would start another."""
        with self._ended:
            there = not self._stopped and not self._session.lost
            self._calls += there
        try:
            yield there
        finally:
            with self._ended:
                self._calls -= there
                self._ended.notify_all()

    def _delete_all(self) -> None:
        """What is this model's."""
        from ray import serve

        own = re.compile(re.escape(self._name) + r"-replica-\d+")
        for name in [name for name in serve.status().applications if own.fullmatch(name)]:
            serve.delete(name)

    def stop(self) -> None:
        """A second time does nothing."""
        with self._ended:
            if self._stopped:
                return
            self._stopped = True
            while not self._ended.wait_for(lambda: not self._calls, CALL_POLL_S):
                if self._session.lost:  # they would wait for it for long
                    break
        try:
            if (self._shared or not self._local) and not self._session.lost:
                self._delete_all()
        finally:
            self._session.leave()
        if not self._shared:
            self._session.close()


def _check_reachable(address: str) -> None:
    """Ray itself would try for as long as it is let, and hear no signal."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        raise ConfigError(f"ray_address must be HOST:PORT or auto, got {address}")
    try:
        socket.create_connection((host, int(port)), REACH_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        problem = "nothing answers there" if isinstance(error, TimeoutError) else str(error)
        raise ConfigError(
            f"cannot use Ray at {address}: {problem}; is its head node up, and the port its GCS's, 6379 unless told?"
        ) from None


def _connect(address: str | None, secret: Path | None) -> Any:
    """Ray itself, connected. Its settings are read from the environment when it is first imported."""
    if address not in (None, "auto"):
        _check_reachable(address)
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # what each replica logs is shown, as it was logged
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    if secret is not None:
        os.environ.update(LOCAL_ONLY)
        token = secret / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN_PATH"] = "token", str(token)
        os.environ.pop("RAY_AUTH_TOKEN", None)
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns of what is meant to be so
    quiet: dict[str, Any] = {"logging_level": "error", "configure_logging": False, "namespace": "quire"}
    try:
        if secret is None:
            ray.init(address=address, **quiet)
        else:
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **quiet,
            )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigError(f"cannot use Ray at {address or 'this machine'}: {error}") from error
    return ray
