"""Split GGUF models: written by the gguf package, read as the whole file is, and refused in one line otherwise."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from quire.assets import describe, resolve
from quire.assets.gguf_parts import part_paths
from quire.types.errors import ModelFileError, ModelNotFoundError


def write(path: Path, tensors: int = 5, parts_of: int = 0) -> None:
    """`parts_of`: tensors a part holds; 0: all in one file."""
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=parts_of)
    writer.add_context_length(64)
    for number in range(tensors):
        writer.add_tensor(f"blk.{number}.w", rng.standard_normal((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "split").mkdir()
    write(tmp_path / "split" / "m.gguf", parts_of=2)
    write(tmp_path / "whole.gguf")
    return tmp_path


def part(folder: Path, number: int) -> Path:
    return folder / "split" / f"m-{number:05d}-of-00003.gguf"


def test_the_package_writes_what_is_expected_here(folder: Path) -> None:
    assert sorted((folder / "split").iterdir()) == [part(folder, n) for n in (1, 2, 3)]


@pytest.mark.parametrize("named", ["split", "split/m-00001-of-00003.gguf", "split/m-00003-of-00003.gguf"])
def test_folder_and_any_part_are_the_whole_model(folder: Path, named: str) -> None:
    model, whole = resolve(str(folder / named)), resolve(str(folder / "whole.gguf"))
    assert (model.name, model.path) == ("m", part(folder, 1))
    ours, expected = model.open(), whole.open()
    assert ours.tensors() == expected.tensors()
    for name in expected.tensors():
        np.testing.assert_array_equal(ours.read(name), expected.read(name))
    assert ours.metadata()["llama.context_length"] == 64
    assert model.size() == sum(path.stat().st_size for path in (folder / "split").iterdir())
    described = describe(model)
    assert (described.parameters, described.context_length, described.problem) == (5 * 4 * 32, 64, "")


@pytest.mark.parametrize("gone", [1, 2, 3])
@pytest.mark.parametrize("named", ["split", "split/m-00001-of-00003.gguf", "split/m-00003-of-00003.gguf"])
def test_a_missing_part_is_one_line(folder: Path, named: str, gone: int) -> None:
    part(folder, gone).unlink()
    with pytest.raises(ModelFileError, match=rf"2 of the 3 parts of m; missing: m-0000{gone}.*fetch") as caught:
        resolve(str(folder / named)).open()
    assert "\n" not in str(caught.value)


def test_parts_of_different_models(folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    write(other / "m.gguf", tensors=6, parts_of=2)
    (other / part(folder, 2).name).rename(part(folder, 2))
    with pytest.raises(ModelFileError, match=r"hold 5 tensors, and they say \d and \d; they are not of one model"):
        resolve(str(folder / "split")).open()


def test_parts_under_wrong_names(folder: Path) -> None:
    first, second, third = (part(folder, n) for n in (1, 2, 3))
    second.rename(folder / "x")
    third.rename(second)
    (folder / "x").rename(third)
    with pytest.raises(ModelFileError, match=r"named part 2 of 3.*split.no 2"):
        resolve(str(first)).open()
    lone = folder / "lone.gguf"
    first.rename(lone)
    with pytest.raises(ModelFileError, match=r"one of 3 parts.*NAME-00001-of-00003"):
        resolve(str(lone)).open()


def test_two_split_models_in_a_folder_are_two(folder: Path) -> None:
    write(folder / "split" / "n.gguf", parts_of=4)
    with pytest.raises(ModelNotFoundError, match=r"several models.*m-00001-of-00003\.gguf.*n-00001-of-00002"):
        resolve(str(folder / "split"))


def test_names_that_only_look_like_parts() -> None:
    for name in ("m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-1-of-3.gguf", "-00001-of-00002.gguf"):
        assert part_paths(Path(name)) == [Path(name)]
    assert len(part_paths(Path("m-00001-of-00001.gguf"))) == 1
