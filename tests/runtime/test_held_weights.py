"""Weights held for the next engine: found by who would load the same, sealed, bounded, and gone with their holder."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest
import torch

from quire.engine.weight_holder import WeightHolder
from quire.runtime.executors.open_executor import not_held
from quire.runtime.hardware import probe, resolve
from quire.runtime.held_weights import HeldWeights, HolderLink
from quire.types.config import EngineOptions
from quire.types.holder_messages import MAX_BLOCKS, Drop, Find, Holding, Keep, receive_message, send_message

SIZE = 10_000

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs the memory files of Linux")


@pytest.fixture(scope="module", autouse=True)
def looked_through():
    """What was there before is not searched for garbage each time that files are counted."""
    gc.collect()
    gc.freeze()


def open_files() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def holder():
    holder = WeightHolder(2 * SIZE)
    yield holder
    holder.close()


@pytest.fixture
def files(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_bytes(b"{}")
    return sorted(tmp_path.iterdir())


def weights(holder: WeightHolder, files: list[Path], **flat: object) -> HeldWeights:
    options = EngineOptions.of(**flat)
    return HolderLink(holder.connect(), files).weights(options, resolve(options, probe("cpu")))


def hold(held: HeldWeights, value: int, size: int = SIZE) -> torch.Tensor:
    assert held.find() is None
    block = held.create(size)
    block.fill_(value)
    held.publish(b"index")
    return block


def test_the_next_engine_maps_the_same_bytes_and_cannot_change_them(holder, files):
    filler = weights(holder, files)
    block = hold(filler, 7)
    assert "weights held" in filler.state and holder.held_bytes == SIZE
    for _ in range(2):
        mapper = weights(holder, files)
        [mapped], index = mapper.find()
        assert index == b"index" and len(mapped) == SIZE and (mapped == 7).all() and "weights mapped" in mapper.state
        mapped += 1  # its own, from then on
    block += 2
    [mapped], _ = weights(holder, files).find()
    assert (mapped == 7).all()
    with pytest.raises(PermissionError):
        os.pwrite(filler._blocks[0].descriptor, b"x", 0)


def touch(files: list[Path]) -> None:
    stat = files[1].stat()
    os.utime(files[1], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def replace(files: list[Path]) -> None:
    """By a file of the same size and time."""
    stat = files[1].stat()
    other = files[1].with_name("other")
    other.write_bytes(b"WEIGHTS")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.rename(files[1])


@pytest.mark.parametrize("change", [touch, replace])
def test_other_files_are_other_weights(holder, files, change):
    hold(weights(holder, files), 7)
    change(files)
    assert weights(holder, files).find() is None


@pytest.mark.parametrize(
    "flat", [{"quantize": "int4"}, {"dtype": "float32"}, {"random_weights": True}, {"invariant": True}]
)
def test_options_that_shape_weights_tell_them_apart(holder, files, flat):
    hold(weights(holder, files), 7)
    assert weights(holder, files, **flat).find() is None
    assert weights(holder, files, max_seqs=3, kv_memory="1M").find() is not None


@pytest.mark.parametrize("change", [touch, lambda files: files[1].unlink()])
def test_files_that_change_while_they_are_loaded_are_not_held(holder, files, change):
    held = weights(holder, files)
    assert held.find() is None
    block = held.create(SIZE).fill_(7)
    change(files)
    held.publish(b"")
    assert "have changed" in held.state and (block == 7).all() and not holder.held_bytes
    assert held.find() is None


def test_files_that_change_before_they_are_looked_for_are_loaded(holder, files):
    """The engine has opened others than those that are held."""
    hold(weights(holder, files), 7)
    late = weights(holder, files)
    touch(files)
    assert late.find() is None and "have changed" in late.state and late.limit == 0


def test_those_that_were_not_used_for_longest_go(holder, files):
    for seqs in ("float32", "bfloat16"):
        hold(weights(holder, files, dtype=seqs), 7)
    assert weights(holder, files, dtype="float32").find() is not None
    hold(weights(holder, files, dtype="float16"), 8)
    found = {dtype: weights(holder, files, dtype=dtype).find() is not None for dtype in ("float32", "bfloat16")}
    assert found == {"float32": True, "bfloat16": False} and holder.held_bytes == 2 * SIZE


def test_more_than_may_be_held_is_not(holder, files):
    held = weights(holder, files)
    hold(held, 7, 2 * SIZE + 1)
    assert held.limit == 2 * SIZE and held.state == "weights are not held" and not holder.held_bytes


def test_released_weights_are_gone(holder, files):
    held = weights(holder, files)
    hold(held, 7)
    held.release()
    assert weights(holder, files).find() is None and not holder.held_bytes


def test_an_engine_without_its_holder_goes_on(files):
    holder = WeightHolder(SIZE)
    early, late = weights(holder, files), weights(holder, files)
    assert early.find() is None
    block = early.create(SIZE).fill_(7)
    holder.close()
    early.publish(b"")
    assert late.find() is None and late.limit == 0 and (block == 7).all()


def test_the_holder_leaves_no_descriptor_behind(files):
    before = open_files()
    holder = WeightHolder(SIZE)
    for value in range(3):
        link = holder.connect()
        options = EngineOptions.of(dtype=("float32", "float16", "bfloat16")[value])
        held = HolderLink(link, files).weights(options, resolve(options, probe("cpu")))
        hold(held, value)
        for block in held._blocks:
            block.close()
        link.close()
    assert open_files() > before
    holder.close()
    assert open_files() == before


@pytest.mark.parametrize("message", [Find("a"), Drop("a"), Keep("a", SIZE + 1)])
def test_descriptors_that_belong_to_nothing_are_closed(message):
    """And one that more come with than there may be ends its link; others go on."""
    holder = WeightHolder(SIZE)
    with holder.connect() as link, holder.connect() as other, open(os.devnull) as file:
        before = open_files()
        send_message(link, message, [file.fileno()] * 3)
        assert not receive_message(link, Holding)[0].held and open_files() == before
        send_message(link, Keep("a", SIZE), [file.fileno()] * (MAX_BLOCKS + 2))
        with pytest.raises(EOFError):
            receive_message(link, Holding)
        assert open_files() == before - 1 and not holder.held_bytes
        send_message(other, Keep("a", SIZE), [file.fileno()])
        assert receive_message(other, Holding)[0].held
    holder.close()


def too_large(patched):
    patched.setattr("quire.runtime.host_blocks.available_bytes", lambda: SIZE - 1)


def unmappable(patched):
    def refuse(*args):
        raise OSError(errno.ENOMEM, "no memory")

    patched.setattr("quire.runtime.host_blocks._map", refuse)


@pytest.mark.parametrize("shortage", [too_large, unmappable])
def test_where_memory_is_short_weights_stay_the_engines_own(holder, files, monkeypatch, shortage):
    held = weights(holder, files)
    assert held.find() is None
    before = open_files()
    with monkeypatch.context() as patched:
        shortage(patched)
        assert held.create(SIZE) is None and "weights cannot be held" in held.state
    assert open_files() == before


def test_what_cannot_be_mapped_is_loaded_and_held_anew(holder, files, monkeypatch):
    hold(weights(holder, files), 7)
    held = weights(holder, files)
    with monkeypatch.context() as patched:
        patched.setattr(held, "_block", lambda *args: (_ for _ in ()).throw(OSError("no such thing here")))
        assert held.find() is None and "no such thing here" in held.state
    hold(held, 8)
    [mapped], _ = weights(holder, files).find()
    assert (mapped == 8).all()


@pytest.mark.parametrize(
    ("flat", "why"),
    [
        ({"kv_dtype": "int8-kivi"}, "scaled by channel"),
        ({"tensor_parallel": 2}, "divided"),
        ({"context_parallel": 2}, "every rank has its own"),
        ({}, ""),
    ],
)
def test_what_cannot_be_held_says_why(flat, why):
    assert why in not_held(EngineOptions.of(**flat)) and bool(why) == bool(not_held(EngineOptions.of(**flat)))


def test_weights_that_cannot_be_sealed_are_not_held(holder, files, monkeypatch):
    def busy(block):
        raise OSError(errno.EBUSY, "a writable mapping is left")

    monkeypatch.setattr("quire.runtime.held_weights.HostBlock.seal", busy)
    held = weights(holder, files)
    hold(held, 7)
    assert "cannot be held" in held.state and not held.held and holder.held_bytes == 0
