"""What is said of a cluster, before there is one."""

from __future__ import annotations

import io
import math
import os
import socket
import sys
from types import SimpleNamespace

import pytest

from quire.cluster import ray_host
from quire.cluster.open_cluster import replica_options
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError
from quire.types.serving import ServeOptions


def test_without_ray_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_host.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[ray\]'"):
        ray_host.RaySession(None)


def test_a_ray_of_ones_own_is_for_this_machine_alone(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: dict = {}
    fake = SimpleNamespace(init=lambda **said: begun.update(said), exceptions=SimpleNamespace(RayError=RuntimeError))
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(os, "environ", {"RAY_AUTH_TOKEN": "another's"})
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    ray_host._connect(None, tmp_path)
    said, token = os.environ, tmp_path / "token"
    assert begun["address"] == "local" and not begun["include_dashboard"]
    assert said["RAY_AUTH_MODE"] == "token" and said["RAY_AUTH_TOKEN_PATH"] == str(token)
    assert "RAY_AUTH_TOKEN" not in said and token.stat().st_mode & 0o777 == 0o600
    assert said["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0", "it listens on loopback"
    assert said["RAY_COLOR_PREFIX"] == said["RAY_DEDUP_LOGS"] == "0", "lines of the log are plain"
    monkeypatch.setattr(os, "environ", {})
    with socket.create_server(("127.0.0.1", 0)) as head:
        there = f"127.0.0.1:{head.getsockname()[1]}"
        ray_host._connect(there, None)
    assert begun["address"] == there and "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ


def test_a_cluster_that_does_not_answer_is_one_line_and_no_wait_for_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        there = f"127.0.0.1:{head.getsockname()[1]}"  # nobody listens there once it is closed
    with pytest.raises(ConfigError, match=rf"^cannot use Ray at {there}: .*refused; is its head node up"):
        ray_host._connect(there, None)
    for mistaken in ("there", "there:", ":6379", "there:port"):
        with pytest.raises(ConfigError, match="must be HOST:PORT or auto"):
            ray_host._connect(mistaken, None)
    with pytest.raises(ConfigError, match=r"cannot use Ray at 127\.0\.0\.1:99999999"):
        ray_host._connect("127.0.0.1:99999999", None)


@pytest.mark.parametrize("option", [{"router": "prefix"}, {"ray_address": "auto"}, {"replica_gpus": 1.0}])
def test_options_of_a_cluster_need_one(option: dict) -> None:
    with pytest.raises(ConfigError, match="has no effect without replicas"):
        ServeOptions(**option)
    assert ServeOptions(replicas=2, **option).replicas == 2


@pytest.mark.parametrize("option", [{"rebalance": False}, {"router": "prefix"}, {"kv_connector": "tcp"}])
def test_options_of_several_replicas_need_several(option: dict) -> None:
    with pytest.raises(ConfigError, match="has no effect with one replica"):
        ServeOptions(replicas=1, **option)
    assert ServeOptions(replicas=1, max_replicas=2, **option).replicas == 1


@pytest.mark.parametrize("name", ["downscale_delay", "upscale_delay", "target_queue_delay"])
def test_no_delay_is_endless(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be a finite number, got inf"):
        ServeOptions(replicas=1, max_replicas=2, **{name: math.inf})


def test_cpus_are_set_aside_on_a_cluster_only() -> None:
    with pytest.raises(ConfigError, match="replica_cpus has no effect without ray_address"):
        ServeOptions(replicas=2, replica_cpus=4.0)
    assert ServeOptions(replicas=2, replica_cpus=4.0, ray_address="auto").replica_cpus == 4.0


def test_replicas_on_one_machine_share_its_cores(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    here, there = ServeOptions(replicas=3), ServeOptions(replicas=3, ray_address="auto")
    assert replica_options(EngineOptions.of(), here).device.threads == 2
    assert replica_options(EngineOptions.of(threads=5), here).device.threads == 5
    assert replica_options(EngineOptions.of(), there).device.threads is None
    with pytest.raises(ConfigError, match="kv_disk is one engine's"):
        replica_options(EngineOptions.of(kv_disk="kv"), here)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert replica_options(EngineOptions.of(model="model"), there).model.model == str(tmp_path / "model")
    assert replica_options(EngineOptions.of(model="smollm2-135m"), there).model.model == "smollm2-135m"
