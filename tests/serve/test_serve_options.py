"""Options of a server: what is refused, what follows from what, and that the docs list all of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from quire.types.errors import ConfigError
from quire.types.serving import ServeOptions, flag

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_queue": 0}, "max_queue must be at least 1"),
        ({"heartbeat": 0.5}, "heartbeat must be at least 1"),
        ({"max_queue_wait": 0}, "max_queue_wait must be more than 0"),
        ({"max_queue_wait": float("nan")}, "max_queue_wait"),
        ({"deadline_ms": -1}, "deadline_ms must not be negative"),
        ({"hang_timeout": 2.0}, "hang_timeout must not be shorter"),
        ({"spare_engine": False, "replicas": 2}, "spare_engine has no effect with replicas"),
        ({"api_workers": 0}, "api_workers must be at least 1"),
        ({"api_workers": 2, "replicas": 2}, "api_workers share one engine, and replicas means several"),
        ({"api_workers": 2, "models": "models.yaml"}, "api_workers share one engine, and models means several"),
        ({"max_body": "lots"}, "must be a size above 0 .* got 'lots'"),
    ],
)
def test_impossible_options(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ServeOptions(**options)


def test_the_admin_port_follows_the_port() -> None:
    assert ServeOptions(port=9000).admin_port_wanted == 9001
    assert ServeOptions(port=0).admin_port_wanted == 0
    assert ServeOptions(port=9000, admin_port=7).admin_port_wanted == 7


def test_every_option_is_in_the_docs_with_its_default() -> None:
    rows = {line.split("`")[1]: line for line in OPERATIONS.read_text().splitlines() if line.startswith("| `--")}
    for field in dataclasses.fields(ServeOptions):
        row = rows[flag(field.name)]
        assert field.metadata["help"] in row, f"{flag(field.name)}: the docs say something else"
        shown = "" if field.default is None else str(field.default)
        assert f"| {shown} |".replace("|  |", "| |") in row, f"{flag(field.name)}: default {shown}"
    assert set(rows) == {flag(field.name) for field in dataclasses.fields(ServeOptions)}
