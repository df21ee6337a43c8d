"""Packages older than what this one asks for are named, wherever they would be used."""

import importlib.metadata
import json

import pytest
from typer.testing import CliRunner

from quire.bench.schema_judge import SchemaJudge
from quire.cli.main import app
from quire.generation.grammar.sandbox_client import GrammarSandbox
from quire.types.errors import NotInstalledError
from quire.types.grammar import GrammarSpec
from quire.types.installed import too_old


@pytest.fixture
def older(monkeypatch, tmp_path):
    """Another llguidance, found before the one that is installed: its metadata, in child processes too."""
    folder = tmp_path / "llguidance-1.5.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: llguidance\nVersion: 1.5.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


def test_versions_are_compared_as_numbers():
    here = importlib.metadata.version("pytest")
    asked = ["pytest>=999.2", "pytest", "nothing-of-the-kind>=1", "pytest>=999; extra == 'x'", f"msgspec>={'0.0.1'}"]
    assert too_old(asked) == {"pytest": f"pytest {here} is too old: pip install 'pytest>=999.2'"}
    assert too_old([f"pytest>={here}"]) == {} == too_old(["pytest>=0.1.10", "pytest>=1"])


def test_what_is_installed_here_is_new_enough():
    assert importlib.metadata.requires("quire") and too_old() == {}


def test_an_old_grammar_compiler_is_named(older, default_model):
    judge = SchemaJudge()
    for attempt in (
        lambda: judge.compile(True),
        lambda: GrammarSandbox().check(GrammarSpec("json_object"), judge.vocabulary),
    ):
        with pytest.raises(
            NotInstalledError, match=r"llguidance 1\.5\.1 is too old: pip install 'llguidance>=1\.\d+'"
        ) as caught:
            attempt()
        assert caught.value.status == 501
    told = CliRunner().invoke(app, ["doctor", "--json"])
    assert "1.5.1 is too old" in json.loads(told.output)["packages"]["llguidance"]
