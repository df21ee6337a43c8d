"""Things kept for callers: bounded, owned, fair, and found again by the next server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.serve.http.http_io import NotFoundError
from quire.serve.openai.object_store import ObjectStore


def name(number: int) -> str:
    return f"resp_{number:032x}"


def data(size: int) -> bytes:
    return b'"' + b"x" * (size - 2) + b'"'


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_bounded_and_owned(tmp_path: Path, on_disk: bool) -> None:
    store = ObjectStore(tmp_path / "s" if on_disk else None, max_objects=3, max_bytes=10_000)

    def there(*numbers: int) -> list[int]:
        return [n for n in numbers if store.find(name(n), "me")]

    for number in range(5):
        store.keep(name(number), "me", data(10))
    assert there(0, 1, 2, 3, 4) == [2, 3, 4]
    assert store.find(name(4), "you") is None
    with pytest.raises(NotFoundError):
        store.delete(name(4), "you", "thing")
    store.keep(name(5), "me", data(8_000))
    store.keep(name(6), "me", data(9_000))
    assert there(2, 4, 5, 6) == [6]
    store.keep(name(7), "me", data(20_000))
    assert there(6, 7) == [6]
    store.delete(name(6), "me", "thing")
    assert there(6) == [] and store.ids() == []
    assert not on_disk or list((tmp_path / "s").iterdir()) == []


def test_one_owner_does_not_push_out_another() -> None:
    store = ObjectStore(max_objects=8)
    store.keep(name(0), "quiet", data(10))
    for number in range(1, 100):
        store.keep(name(number), "busy", data(10))
    assert store.find(name(0), "quiet") and len(store.ids("busy")) == 7


def test_another_server_finds_it(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = ObjectStore(tmp_path / "s")
        store.keep(name(1), "me", b'{"a": 1}')
        store.keep(name(1), "me", b'{"a": 2}')
    finally:
        os.umask(old)
    [path] = (tmp_path / "s").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    (path.parent / f"{name(2)}.json").write_text('"me"\n{"cut')
    (path.parent / f"{name(3)}.part").write_text("cut")
    (path.parent / "stranger.json").write_text("x")
    again = ObjectStore(tmp_path / "s")
    assert again.find(name(1), "me") == b'{"a": 2}' and again.find(name(1), "you") is None
    assert [id for id, _ in again.ids()] == [name(1)] and not list(path.parent.glob("*.part"))
    path.unlink()
    assert again.find(name(1), "me") is None and again.ids() == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ObjectStore(tmp_path / "s")
    (tmp_path / "s" / f"{name(1)}.part").mkdir()  # in the way
    store.keep(name(1), "me", b"{}")
    assert store.find(name(1), "me") == b"{}" and "will not outlive" in caplog.text
