"""The GGUF reader: equal to the gguf package on what it writes, and never fooled by what nobody should write."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from quire.assets.gguf_reader import BLOCKS, TYPES, GGUFFile
from quire.types.errors import ModelFileError

QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
QUANTISED += ["IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "MXFP4"]


def write_sample(path: Path) -> Path:
    """Every value type, nested arrays, every tensor type."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -100)
    writer.add_uint16("t.u16", 60000)
    writer.add_int16("t.i16", -30000)
    writer.add_uint32("t.u32", 4_000_000_000)
    writer.add_int32("t.i32", -2_000_000_000)
    writer.add_uint64("t.u64", 1 << 63)
    writer.add_int64("t.i64", -(1 << 62))
    writer.add_float32("t.f32", 0.5)
    writer.add_float64("t.f64", 0.1)
    writer.add_bool("t.yes", True)
    writer.add_string("t.text", "grüße 🙂\n")
    writer.add_array("t.strings", ["a", "", "ß", "🙂" * 3])
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_array("t.floats", [0.25, -1.5])
    writer.add_array("t.bools", [True, False, True])
    writer.add_array("t.nested", [[1, 2], [3]])
    writer.add_tensor("f32", rng.standard_normal((3, 5), dtype=np.float32))
    writer.add_tensor("f16", rng.standard_normal((2, 3, 4)).astype(np.float16))
    writer.add_tensor("i32", np.arange(7, dtype=np.int32))
    for kind in [*QUANTISED, "BF16"]:
        _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        data = rng.integers(0, 256, (4, 2 * size), dtype=np.uint8)
        writer.add_tensor(kind, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("gguf") / "sample.gguf")


def test_equal_to_the_gguf_package(sample: Path) -> None:
    # the package cannot give the contents of nested arrays, so that one is compared by value
    ours = GGUFFile(sample)
    assert ours.metadata()["t.nested"] == [[1, 2], [3]]
    oracle = gguf.GGUFReader(sample)
    for key, field in oracle.fields.items():
        if not key.startswith("GGUF.") and key != "t.nested":
            assert ours.metadata()[key] == field.contents(), key
    assert set(ours.metadata()) == {k for k in oracle.fields if not k.startswith("GGUF.")}
    for tensor in oracle.tensors:
        info = ours.tensors()[tensor.name]
        assert (info.kind, info.nbytes) == (tensor.tensor_type.name, tensor.n_bytes)
        assert info.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert np.array_equal(ours.read(tensor.name), np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1))
        assert not ours.read(tensor.name).flags.writeable


def test_block_table_is_the_gguf_packages() -> None:
    for number, (name, elements, size) in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (elements, size))
    assert set(QUANTISED) | {"F32", "F16", "BF16"} <= set(BLOCKS)


# Hand-made files: small, and wrong in exactly one way


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def info(
    name: str = "w", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0, count: int | None = None
) -> bytes:
    shape = struct.pack(f"<{len(dims)}Q", *dims)
    return (
        text(name) + struct.pack("<I", len(dims) if count is None else count) + shape + struct.pack("<IQ", kind, offset)
    )


def build(
    keys: list[bytes] | None = None,
    infos: list[bytes] | None = None,
    data: int = 64,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
) -> bytes:
    keys = [key("general.architecture", 8, text("llama"))] if keys is None else keys
    infos = [info()] if infos is None else infos
    counts = (len(infos) if tensor_count is None else tensor_count, len(keys) if key_count is None else key_count)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(range(data % 256)) if data else head


def open_bytes(tmp_path: Path, data: bytes) -> GGUFFile:
    path = tmp_path / "case.gguf"
    path.unlink(missing_ok=True)  # writing over a file can wait for the disk; making a new one does not
    path.write_bytes(data)
    return GGUFFile(path)


def test_the_builder_itself_makes_sound_files(tmp_path: Path) -> None:
    file = open_bytes(tmp_path, build())
    assert file.tensors()["w"].shape == (4,)
    assert bytes(file.read("w")) == bytes(range(16))


U32, U64_MAX = struct.Struct("<I").pack, (1 << 64) - 1
BAD = {
    "empty": (b"", "empty"),
    "wrong magic": (build(magic=b"GGML"), "not a GGUF"),
    "short": (b"GG", "not a GGUF"),
    "version 1": (build(version=1), "version 1"),
    "big endian": (build(version=3 << 24), "big-endian"),
    "many keys": (build(key_count=U64_MAX), "keys, more than"),
    "many tensors": (build(tensor_count=U64_MAX), "tensors, more than"),
    "huge key": (build(keys=[struct.pack("<Q", U64_MAX) + b"abc" + bytes(9)]), "length of a key"),
    "key past the end": (build(keys=[struct.pack("<Q", 100_000) + b"abc" + bytes(9)]), "ends inside a key"),
    "bad utf-8": (build(keys=[key("a", 8, text(b"\xff\xfe"))]), "not UTF-8"),
    "repeated key": (build(keys=[key("a", 4, U32(1)), key("a", 4, U32(2))]), "'a' appears twice"),
    "unknown value type": (build(keys=[key("a", 13, U32(1))]), "unknown value type 13"),
    "boolean of 2": (build(keys=[key("a", 7, b"\x02")]), "neither 0 nor 1"),
    "lying array": (build(keys=[key("a", 9, struct.pack("<IQ", 4, 1 << 22))]), "ends inside"),
    "enormous array": (build(keys=[key("a", 9, struct.pack("<IQ", 0, 1 << 40))]), "elements"),
    "lying string array": (build(keys=[key("a", 9, struct.pack("<IQ", 8, 1 << 23))]), "more than the file"),
    "bad utf-8 among strings": (
        build(keys=[key("a", 9, struct.pack("<IQ", 8, 3) + text("x") + text(b"\xff") + text("y"))]),
        "an element of 'a' is not UTF-8",
    ),
    "huge string among others": (
        build(keys=[key("a", 9, struct.pack("<IQ", 8, 2) + text("x") + struct.pack("<Q", U64_MAX))]),
        "the length of an element of 'a'",
    ),
    "string past the end": (
        build(keys=[key("a", 9, struct.pack("<IQ", 8, 2) + text("x") + struct.pack("<Q", 100_000) + b"abc")]),
        "ends inside an element of 'a'",
    ),
    "deep array": (build(keys=[key("a", 9, struct.pack("<IQ", 9, 1) * 9 + struct.pack("<IQ", 4, 0))]), "nested"),
    "alignment 0": (build(keys=[key("general.alignment", 4, U32(0))]), "general.alignment"),
    "alignment 48": (build(keys=[key("general.alignment", 4, U32(48))]), "general.alignment"),
    "alignment text": (build(keys=[key("general.alignment", 8, text("32"))]), "general.alignment"),
    "no dimensions": (build(infos=[info(dims=())]), "0 dimensions"),
    "many dimensions": (build(infos=[info(count=U64_MAX & 0xFFFFFFFF)]), "dimensions"),
    "empty dimension": (build(infos=[info(dims=(4, 0))]), "empty dimension"),
    "overflowing product": (build(infos=[info(dims=(1 << 32, 1 << 32, 1 << 32))]), "truncated"),
    "unknown tensor type": (build(infos=[info(kind=99)]), "type number 99"),
    "type we do not read": (build(infos=[info(kind=34)]), "type number 34"),
    "ragged blocks": (build(infos=[info(dims=(33,), kind=2)]), "not a multiple"),
    "crooked offset": (build(infos=[info(offset=8)]), "not a multiple of 32"),
    "offset past the end": (build(infos=[info(offset=1 << 40)]), "truncated"),
    "repeated tensor": (build(infos=[info(), info(offset=32)]), "'w' appears twice"),
    "overlap": (build(infos=[info("a", (16,)), info("b", (4,), offset=32)]), "overlap"),
    "no data": (build(data=0), "truncated"),
}


@pytest.mark.parametrize("case", BAD)
def test_each_lie_has_its_own_error(case: str, tmp_path: Path) -> None:
    data, message = BAD[case]
    with pytest.raises(ModelFileError, match=message) as caught:
        open_bytes(tmp_path, data)
    assert "case.gguf" in str(caught.value)


def test_truncation_at_every_byte_of_the_header(tmp_path: Path) -> None:
    whole = build(keys=[key("a", 8, text("bc")), key("d", 9, struct.pack("<IQ", 8, 2) + text("e") + text("f"))])
    open_bytes(tmp_path, whole)
    for cut in range(len(whole) - 64 + 16):  # the tensor needs 16 of the 64 data bytes
        with pytest.raises(ModelFileError):
            open_bytes(tmp_path, whole[:cut])


def test_lies_are_cheap(tmp_path: Path) -> None:
    """Counts and lengths are checked before memory is taken for what they promise."""
    tracemalloc.start()
    for data, _ in BAD.values():
        with pytest.raises(ModelFileError):
            open_bytes(tmp_path, data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_random_damage_never_surprises(sample: Path, tmp_path: Path) -> None:
    """Thousands of damaged headers: each is read, or refused with ModelFileError and nothing else."""
    rng = random.Random(20)
    whole = sample.read_bytes()
    header = gguf.GGUFReader(sample).tensors[0].data_offset
    refused = 0
    for _ in range(2500):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(header)
            if rng.random() < 0.3:
                data[at : at + 8] = struct.pack("<Q", rng.choice((U64_MAX, 1 << 63, 1 << 32, len(whole), 0)))
            else:
                data[at] = rng.randrange(256)
        try:
            file = open_bytes(tmp_path, data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)
        except ModelFileError:
            refused += 1
        else:
            for name, entry in file.tensors().items():
                assert len(file.read(name)) == entry.nbytes
    assert 800 < refused < 2500
