"""API keys: what a key file may say, and which keys open what."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli.main import app
from quire.serve.core.api_keys import ADMIN, INFERENCE, KeyRing, digest, load_keys
from quire.types.errors import ConfigError, UnauthorizedError

SECRET = "sk-test-0123456789abcdef"
DIGEST = digest(SECRET).hex()


def load(tmp_path: Path, text: str, mode: int = 0o600) -> KeyRing:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    return load_keys(str(path), {})


def test_keys_from_a_file(tmp_path: Path) -> None:
    ring = load(
        tmp_path,
        f"""
        [[key]]
        name = "alice"
        sha256 = "{DIGEST}"
        concurrency = 3
        tokens_per_minute = 1000
        weight = 2.5
        slo_ttft = 0.5
        [[key]]
        name = "ops"
        key = "another-long-secret-key"
        scopes = ["admin", "inference"]
        """,
    )
    alice, ops = ring.find(SECRET), ring.find("another-long-secret-key")
    assert (alice.name, alice.scopes, alice.concurrency, alice.tokens_per_minute) == ("alice", {INFERENCE}, 3, 1000)
    assert (ops.name, ops.scopes, ops.concurrency) == ("ops", {INFERENCE, ADMIN}, None)
    assert (alice.weight, alice.slo_ttft, alice.slo_tpot, ops.weight) == (2.5, 0.5, 0.0, 1.0)
    for wrong in (None, "", "x", SECRET + "x", SECRET[:-1], "\udcff"):
        with pytest.raises(UnauthorizedError):
            ring.find(wrong)


def test_keys_from_the_environment() -> None:
    ring = load_keys(None, {"QUIRE_API_KEY": SECRET, "QUIRE_ADMIN_KEY": SECRET + "-admin"})
    assert ring.find(SECRET).scopes == {INFERENCE}
    assert ring.find(SECRET + "-admin").scopes == {ADMIN}
    assert load_keys(None, {}).open and load_keys(None, {"QUIRE_API_KEY": ""}).open


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds \\[\\[key\\]\\] tables"),
        ("x = 1", "holds \\[\\[key\\]\\] tables"),
        ("[[key]", "cannot read"),
        (f'[[key]]\nsha256 = "{DIGEST}"', "needs a name"),
        (f'[[key]]\nname = "a b"\nsha256 = "{DIGEST}"', "needs a name"),
        ('[[key]]\nname = "a"', "either sha256 or key"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\nkey = "{SECRET}"', "either sha256 or key"),
        ('[[key]]\nname = "a"\nsha256 = "abc"', "64 hexadecimal"),
        ('[[key]]\nname = "a"\nkey = "short"', "too short"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\nscopes = ["root"]', "scopes"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\nscopes = []', "scopes"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\nconcurrency = -1', "concurrency"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\ntokens_per_minute = true', "tokens_per_minute"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\nweight = 0', "weight"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\nslo_tpot = "fast"', "slo_tpot"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\nscope = "admin"', "unknown field 'scope'"),
        (f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\n' * 2, "used twice"),
    ],
)
def test_bad_key_files_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(tmp_path, text)


def test_keys_in_clear_must_be_private(tmp_path: Path) -> None:
    text = f'[[key]]\nname = "a"\nkey = "{SECRET}"'
    with pytest.raises(ConfigError, match="chmod 600"):
        load(tmp_path, text, 0o644)
    load(tmp_path, text.replace("key = ", "sha256 = ").replace(SECRET, DIGEST), 0o644)


def test_no_key_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot read the key file"):
        load_keys("/nonexistent/keys.toml", {})


def test_a_new_key_opens_what_it_says(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["keys", "new", "carol", "--scope", "admin", "--scope", "inference"])
    assert result.exit_code == 0, result.output
    secret = result.stderr.split()[-1]
    assert secret not in result.stdout
    key = load(tmp_path, result.stdout, 0o644).find(secret)
    assert (key.name, key.scopes) == ("carol", {INFERENCE, ADMIN})
