"""The reader of GGUF files: what the `gguf` package writes, and damaged files, which are refused with their name."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headstart.core.errors import ConfigError
from headstart.gguf.gguf_reader import read_gguf
from headstart.gguf.tensor_types import SUPPORTED_TYPES


def write(path: Path, *, split: tuple[int, int, int] | None = None, names: tuple[str, ...] = ("a", "b")) -> Path:
    """Write a small file with metadata of every type and F32 tensors [2, 32] of these names."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -5)
    writer.add_uint64("u64", 1 << 40)
    writer.add_int64("i64", -(1 << 40))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 東京\n")
    writer.add_array("texts", ["a", "", "ж"])
    writer.add_array("numbers", [1, -2, 3])
    if split is not None:
        for key, value in zip(("split.no", "split.count"), split[:2], strict=True):
            writer.add_uint16(key, value)
        writer.add_int32("split.tensors.count", split[2])
    for number, name in enumerate(names):
        writer.add_tensor(name, np.full((2, 32), number, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("good") / "good.gguf").read_bytes()


def test_metadata_and_tensors_are_those_written(tmp_path: Path) -> None:
    file = read_gguf(write(tmp_path / "m.gguf"))
    expected: dict[str, Any] = {
        "general.architecture": "llama", "u8": 200, "i8": -3, "u16": 60_000, "i16": -30_000, "u32": 4_000_000_000,
        "i32": -5, "u64": 1 << 40, "i64": -(1 << 40), "f32": 0.5, "f64": 0.1, "yes": True, "text": "naïve 東京\n",
        "texts": ["a", "", "ж"], "numbers": [1, -2, 3],
    }  # fmt: skip
    assert file.metadata == expected
    info = file.tensors["b"]
    assert (info.kind, info.shape, info.end - info.begin) == ("F32", (2, 32), 256)
    assert np.fromfile(info.file, "<f4", 64, offset=info.begin).tolist() == [1.0] * 64


def test_places_are_those_of_the_package(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", names=("a", "b", "c"))
    theirs = {tensor.name: tensor.data_offset for tensor in gguf.GGUFReader(path).tensors}
    assert {name: info.begin for name, info in read_gguf(path).tensors.items()} == theirs


def test_a_file_cut_anywhere_is_refused_with_its_name(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for length in (*range(0, len(good), 7), len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf"):
            read_gguf(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(good: bytes, tmp_path: Path, data: st.DataObject) -> None:
    changed = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(good) - 1))
        size = data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(st.sampled_from([0, 1, 255, 1 << 31, (1 << 63) + 1, (1 << 64) - 1]) | st.integers(0, 1 << 32))
        changed[at : at + size] = (value % (1 << (8 * size))).to_bytes(size, "little")
    path = tmp_path / "changed.gguf"
    path.write_bytes(changed)
    try:
        file = read_gguf(path)
    except ConfigError as error:
        assert "changed.gguf" in str(error) and "\n" not in str(error) and len(str(error)) < 1000
        return
    for info in file.tensors.values():
        assert 0 <= info.begin < info.end <= len(changed) and 0 not in info.shape


def edited(good: bytes, old: bytes, new: bytes) -> bytes:
    assert old in good
    return good.replace(old, new, 1)


TEXTS = b"texts\x09\0\0\0\x08\0\0\0"
PLACE = b"a\x02\0\0\0\x20"
HUGE = struct.pack("<Q", 1 << 62)
DAMAGES: list[tuple[str, Callable[[bytes], bytes]]] = [
    (r"is a Git LFS pointer, not the file itself", lambda good: b"version https://git-lfs.github.com/spec/v1\noid x\n"),
    (r"is not a GGUF file: it begins with b'PK\\x03\\x04'", lambda good: b"PK\x03\x04"),
    (r"is not a GGUF file: it begins with b''", lambda good: b""),
    (r"version 4 is not supported", lambda good: edited(good, b"GGUF\x03", b"GGUF\x04")),
    (r"seems to be big-endian", lambda good: good[:4] + struct.pack(">I", 3) + good[8:]),
    (r"\d+ tensors are more than", lambda good: good[:8] + HUGE + good[16:]),
    (r"\d+ metadata keys are more than", lambda good: good[:16] + HUGE + good[24:]),
    (r"a metadata key goes beyond the end", lambda good: good[:24] + HUGE + good[32:]),
    (r"metadata key u8 is there twice", lambda good: edited(good, b"\x02\0\0\0\0\0\0\0i8", b"\x02\0\0\0\0\0\0\0u8")),
    (r"value of text is not UTF-8", lambda good: edited(good, "naïve".encode(), b"na\xff\xffve")),
    (r"has values of type 99", lambda good: edited(good, b"yes\x07\0\0\0", b"yes\x63\0\0\0")),
    (r"items of texts are more than", lambda good: edited(good, TEXTS + b"\x03", TEXTS + b"\x03\0\0\0\1")),
    (r"tensor a has 9 dimensions", lambda good: edited(good, b"a\x02\0\0\0\x20", b"a\x09\0\0\0\x20")),
    (r"tensor a has a dimension of 0", lambda good: edited(good, b"a\x02\0\0\0\x20", b"a\x02\0\0\0\0")),
    (r"tensor a ends at byte \d+, but the file has", lambda good: edited(good, PLACE + bytes(2), PLACE + b"\0\x10")),
    (r"tensor a is there twice", lambda good: edited(good, b"\x01\0\0\0\0\0\0\0b", b"\x01\0\0\0\0\0\0\0a")),
    (r"goes beyond the end of the file|is too long|ends at byte", lambda good: good[:-100]),
]  # fmt: skip


@pytest.mark.parametrize(("message", "damage"), DAMAGES, ids=[message for message, _ in DAMAGES])
def test_damage_is_named(message: str, damage: Callable[[bytes], bytes], good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damage(good))
    with pytest.raises(ConfigError, match=message) as caught:
        read_gguf(path)
    assert "damaged.gguf" in str(caught.value)


@pytest.mark.parametrize(("type_id", "name"), [(10, "Q2_K"), (20, "IQ4_NL"), (39, "MXFP4"), (77, "type 77")])
def test_a_type_that_is_not_supported_is_named(type_id: int, name: str, good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    shape = b"a\x02\0\0\0" + struct.pack("<QQ", 32, 2)
    path.write_bytes(edited(good, shape + b"\0", shape + bytes([type_id])))
    with pytest.raises(ConfigError, match=rf"tensor a is stored as {name}; supported are {', '.join(SUPPORTED_TYPES)}"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("message", "damage"),
    [
        (r"tensor b begins at byte \d+, not at \d+", lambda good: moved(good, -256)),  # over the first
        (r"tensor b begins at byte \d+, not at \d+", lambda good: moved(good, 32)),  # a gap
        (r"tensor b begins at byte \d+, not at \d+", lambda good: retyped(good, b"a", 1)),  # smaller
        (r"tensor a ends at byte|tensor b begins at byte", lambda good: edited(good, PLACE, PLACE[:-1] + b"\x40")),
        (r"128 bytes behind byte \d+ are no tensor's", lambda good: retyped(good, b"b", 1)),
        (r"4096 bytes behind byte \d+ are no tensor's", lambda good: good + bytes(4096)),
    ],
)
def test_tensors_that_do_not_tile_the_file_are_refused(
    message: str, damage: Callable[[bytes], bytes], good: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(damage(good))
    with pytest.raises(ConfigError, match=message):
        read_gguf(path)


def moved(good: bytes, by: int) -> bytes:
    """The file with the second tensor at another place."""
    place = b"b\x02\0\0\0" + struct.pack("<QQI", 32, 2, 0)
    return edited(good, place + struct.pack("<Q", 256), place + struct.pack("<Q", 256 + by))


def retyped(good: bytes, name: bytes, type_id: int) -> bytes:
    """The file with another type of one tensor."""
    place = name + b"\x02\0\0\0" + struct.pack("<QQ", 32, 2)
    return edited(good, place + b"\0", place + bytes([type_id]))


def test_tensors_may_be_padded_to_their_alignment_or_not_at_the_end(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("a", np.ones((1, 3), np.float32))
    writer.add_tensor("b", np.ones((1, 5), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    padded = path.read_bytes()
    whole = padded[: -12 if len(padded) % 32 == 0 else None]
    for content in (padded, whole):
        path.write_bytes(content)
        assert [info.end - info.begin for info in read_gguf(path).tensors.values()] == [12, 20]


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a regular file"):
        read_gguf(tmp_path)
    with pytest.raises(ConfigError, match=r"none\.gguf cannot be read: No such file"):
        read_gguf(tmp_path / "none.gguf")


def parts(folder: Path) -> list[Path]:
    named = [folder / f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for number, path in enumerate(named):
        write(path, split=(number, 3, 4), names=(("a",), ("b", "c"), ("d",))[number])
    return named


def test_the_files_of_a_split_model_are_read_as_one(tmp_path: Path) -> None:
    named = parts(tmp_path)
    file = read_gguf(named[0])
    assert {name: info.file for name, info in file.tensors.items()} == dict(
        zip("abcd", (named[0], named[1], named[1], named[2]), strict=True)
    )


def test_a_part_with_another_number_or_metadata_of_its_own_is_refused(tmp_path: Path) -> None:
    named = parts(tmp_path)
    write(named[1], split=(2, 3, 4), names=("b", "c"))
    with pytest.raises(ConfigError, match=r"m-00002-of-00003\.gguf: split.no is 2; by its name it is file 1 from 0"):
        read_gguf(named[0])
    content = write(named[1], split=(1, 3, 4), names=("b", "c")).read_bytes()
    named[1].write_bytes(edited(content, struct.pack("<f", 0.5), struct.pack("<f", 0.25)))
    with pytest.raises(ConfigError, match=r"m-00002-of-00003\.gguf: metadata key f32 is not that of m-00001-of"):
        read_gguf(named[0])


def test_parts_of_a_split_model_that_are_missing_or_not_the_first_are_refused(tmp_path: Path) -> None:
    named = parts(tmp_path)
    with pytest.raises(ConfigError, match=r"is file 2 of 3 of a model: name the first, m-00001-of-00003\.gguf"):
        read_gguf(named[1])
    renamed = named[0].rename(tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match="is one of 3 files of a model, but is not called"):
        read_gguf(renamed)
    renamed.rename(named[0])
    write(named[2], split=(2, 3, 4), names=("a",))
    with pytest.raises(ConfigError, match=r"tensor a is also in m-00001-of-00003\.gguf"):
        read_gguf(named[0])
    named[2].unlink()
    with pytest.raises(ConfigError, match=r"m-00003-of-00003\.gguf is missing beside it"):
        read_gguf(named[0])
