"""The attacks of scripts/attacks.py: the API process stays as large as it was, answers meanwhile, and another key lives
as if alone. How long answers take is measured by the script, not here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_frontend import FakeFrontend

HERE = Path(__file__).parent
spec = importlib.util.spec_from_file_location("attacks", HERE.parents[1] / "scripts/attacks.py")
assert spec and spec.loader
attacks: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(attacks)

attacks.SECONDS = 3.0

MIB = 1 << 20
MODEL = FakeFrontend.model_name


class Target(NamedTuple):
    pid: int
    ports: dict[str, tuple[str, int]]

    def caller(self, name: str) -> Any:
        return attacks.Caller(self.ports["API"], attacks.KEYS[name])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("files")
    command = [sys.executable, str(HERE / "attack_target.py"), str(folder), *attacks.KEYS]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        public, admin, rpc = server.stdout.readline().split()
        ports = {name: _address(url) for name, url in (("API", public), ("admin", admin))}
        found = Target(server.pid, ports | {"gRPC": ("127.0.0.1", int(rpc))})
        for _ in range(3):  # what is made but once is made
            assert not attacks.lives(found.caller("bob"), MODEL)
        for attack in attacks.WIRE.values():
            attack(found.ports["API"], MIB // 4)
        for attack in attacks.RPC.values():
            attack(found.ports["gRPC"], MIB // 4)
        yield found
    finally:
        server.terminate()
        server.wait(30)


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def survives(target: Target, attack: Any, most: int = 20 * MIB) -> None:
    before = attacks.resident(target.pid)
    with attacks.Probe(target.ports["API"], target.pid) as probe:
        attack()
    assert probe.failed == 0 and probe.asked > 0
    assert max(probe.most, attacks.resident(target.pid)) - before < most
    assert not attacks.lives(target.caller("bob"), MODEL)


SLOW = {("empty_lines_in_chunks", "admin"), ("pipelined", "admin")}  # both ports read requests with the same code


@pytest.mark.parametrize(
    ("name", "port"),
    [
        pytest.param(name, port, marks=[pytest.mark.slow] * ((name, port) in SLOW))
        for name in attacks.WIRE
        for port in ("API", "admin")
    ],
)
def test_bytes_without_a_key(target: Target, name: str, port: str) -> None:
    survives(target, lambda: attacks.WIRE[name](target.ports[port], 24 * MIB))


@pytest.mark.parametrize("name", attacks.RPC)
def test_rpc_without_a_key(target: Target, name: str) -> None:
    survives(target, lambda: attacks.RPC[name](target.ports["gRPC"], 24 * MIB))


def test_messages_that_nobody_reads_stay_with_their_senders(target: Target) -> None:
    survives(target, lambda: attacks.large_messages(target.ports["gRPC"], 80 * MIB), most=8 * MIB)


@pytest.mark.parametrize("name", attacks.API)
def test_what_a_key_may_do(target: Target, name: str) -> None:
    survives(target, lambda: attacks.API[name](target.caller("alice"), MODEL, 300))
