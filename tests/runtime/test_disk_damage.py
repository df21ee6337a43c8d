"""The disk tier over files that were flipped, cut, swapped or written for other models: never a wrong page."""

import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from test_tier_contract import LAYOUT, SIZE, do, key, page

from quire.runtime.tiers.disk import DiskFolder, DiskTier
from quire.runtime.tiers.signed_page import PageSigner
from quire.types.errors import ConfigError

SECRET = bytes(range(32))
PAGES = 40


def open_tier(path, *, model=b"model", size=1 << 20, layout=LAYOUT):
    folder = DiskFolder(path)
    return DiskTier(folder, PageSigner(SECRET, model, layout), size, threading.Event())


def filled(path):
    store = open_tier(path)
    assert all(do(store, "put", [key(i) for i in range(PAGES)], [page(i) for i in range(PAGES)]))
    return store


def files(path):
    return sorted(f for f in Path(path).glob("*/*/*"))


def damage(rng, file, others):
    """One random corruption; returns the bytes that undo it."""
    before = file.read_bytes()
    kind = rng.randrange(5)
    data = bytearray(before)
    if kind == 0:  # a flipped bit
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:  # cut short
        del data[rng.randrange(len(data)) :]
    elif kind == 2:  # another page's file
        data = bytearray(rng.choice([o for o in others if o != file]).read_bytes())
    elif kind == 3:  # longer than it was
        data += rng.randbytes(rng.randint(1, 64))
    else:  # a stretch of noise
        at = rng.randrange(len(data))
        data[at : at + 16] = rng.randbytes(len(data[at : at + 16]))
    file.write_bytes(data)
    return before, bytes(data) != before


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_corruptions_are_all_detected(tmp_path, count):
    store = filled(tmp_path / "kv")
    rng = random.Random(5)
    all_files = files(tmp_path / "kv")
    by_name = {store._path(key(i)): i for i in range(PAGES)}
    into = np.zeros(SIZE, np.uint8)
    for _ in range(count):
        file = rng.choice(all_files)
        before, changed = damage(rng, file, all_files)
        into[:] = 7
        found = store._get_one(key(by_name[file]), into)
        if changed:
            assert not found and (into == 7).all()
        file.write_bytes(before)
    assert store._get_one(key(3), into) and (into == page(3)).all()
    store.close()


def test_another_model_layout_or_secret_finds_nothing(tmp_path):
    filled(tmp_path / "kv").close()
    store = open_tier(tmp_path / "kv", model=b"other")
    assert store.scan() == []
    # ... not even where a file of the first lies under the name the second would look for.
    wanted = store._path(key(1))
    wanted.parent.mkdir(exist_ok=True)
    wanted.write_bytes(next(f for f in files(tmp_path / "kv") if f.name == wanted.name).read_bytes())
    assert do(store, "get", [key(1)], [np.zeros(SIZE, np.uint8)]) == [False]
    store.close()


def test_a_restart_finds_what_was_there_in_order_of_use(tmp_path):
    store = filled(tmp_path / "kv")
    store.close()
    for age, file in enumerate(files(tmp_path / "kv")):
        os.utime(file, (1000 + age, 1000 + age))
    again = open_tier(tmp_path / "kv")
    names = [f.name for f in files(tmp_path / "kv")]
    assert [f"{name.hex()}-{group}" for group, name in again.scan()] == names
    assert do(again, "get", [key(2)], [into := np.zeros(SIZE, np.uint8)]) == [True] and (into == page(2)).all()
    again.close()


def test_half_written_files_and_too_many_are_removed_at_start(tmp_path):
    filled(tmp_path / "kv").close()
    left = files(tmp_path / "kv")[0].with_name("left.part")
    left.write_bytes(b"half")
    small = open_tier(tmp_path / "kv", size=10 * 4096)
    assert len(small.scan()) == 10 == len(files(tmp_path / "kv")) and not left.exists()
    small.close()


def test_pages_of_other_models_make_room(tmp_path):
    filled(tmp_path / "kv").close()
    store = open_tier(tmp_path / "kv", model=b"other", size=3 * 4096)
    assert files(tmp_path / "kv") == []
    store.close()


def test_a_directory_serves_one_engine_at_a_time(tmp_path):
    store = open_tier(tmp_path / "kv")
    with pytest.raises(ConfigError, match="another engine uses"):
        DiskFolder(tmp_path / "kv")
    store.close()
    open_tier(tmp_path / "kv").close()


def test_the_secret_is_kept_and_for_this_user_only(tmp_path):
    folder = DiskFolder(tmp_path / "kv")
    assert folder.secret() == folder.secret() and (tmp_path / "kv" / "secret").stat().st_mode & 0o777 == 0o600
    assert folder.secret(b"s" * 32) == b"s" * 32 == folder.secret()
    folder.release()
