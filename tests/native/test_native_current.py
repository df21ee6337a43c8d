"""A build that has fallen behind its sources is refused, and everybody who asks is told so, with the remedy."""

import importlib.util
import logging
import shutil

import pytest
import torch
from typer.testing import CliRunner

from quire.cli.main import app
from quire.kernels.cpu import shared_object as library
from quire.model.loading import load as loading

BUILT = importlib.util.find_spec("quire.kernels.cpu._native")
STALE = f"the compiled kernels were not built from the sources beside them; {library.REMEDY}"


@pytest.fixture
def path():
    if BUILT is None:
        pytest.skip("the compiled kernels were not built")
    return BUILT.origin


def test_what_is_built_here_is_current(path):
    assert library.available() is None


def test_other_sources_are_noticed(path, tmp_path):
    assert not isinstance(library.open_current(path, tmp_path), str), "nothing to compare with: installed"
    sources = shutil.copytree(library.SOURCES, tmp_path / "csrc")
    assert not isinstance(library.open_current(path, sources), str)
    (sources / "pool.h").write_text((sources / "pool.h").read_text() + "// changed since\n")
    assert library.open_current(path, sources) == STALE


def test_an_older_build_is_noticed(path, tmp_path, monkeypatch):
    monkeypatch.setitem(library._SIGNATURES, "quire_of_tomorrow", (None, []))
    told = library.open_current(path)
    assert "older than the code that calls them" in told and "quire_of_tomorrow" in told and library.REMEDY in told
    (tmp_path / "broken.so").write_text("no library")
    assert "do not load" in library.open_current(str(tmp_path / "broken.so"))


def test_the_doctor_and_the_log_say_so(default_model, monkeypatch, caplog):
    monkeypatch.setattr(library, "load", lambda: STALE)
    told = CliRunner().invoke(app, ["doctor"], catch_exceptions=False, env={"COLUMNS": "300"}).output
    assert STALE in told
    monkeypatch.setattr(loading, "fill_weights", lambda *_: None)
    with caplog.at_level(logging.WARNING):
        model = loading.load_model(default_model.open(), device="cpu", dtype=torch.float32, compiled=1)
    (record,) = caplog.records
    assert STALE in record.getMessage() and any(STALE in reason for reason in model.describe())
