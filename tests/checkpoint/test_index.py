"""An index is data: no file runs code, changes a class or has anything overwritten, however its pickle was made."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import zipfile
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import opcodes
import pytest
import torch
import torch.distributed as dist
from killed import model
from opcodes import NONE, Evil, attributes, changed, fields, made, named, put, table, value
from ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, ChunkStorageMetadata, Metadata

from lpq import checkpoint
from lpq.checkpoint import CheckpointError, index, version_1
from lpq.tensor.quantized_tensor import rebuild

CLASSES = [
    metadata.Metadata, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata,
    metadata.TensorProperties, metadata.MetadataIndex, metadata.StorageMeta, filesystem._StorageInfo, version_1.Record,
    rebuild, nn.Parameter,
]  # fmt: skip
"""Modules that a file refers to, or could."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of version 1, whose index is a pickle; every value is 10."""
    return opcodes.as_version_1(checkpoint.save(model(10.0), tmp_path / "saved"))


@pytest.fixture
def later(tmp_path: Path) -> Path:
    """A checkpoint with an index in JSON; every value is 10."""
    return checkpoint.save(model(10.0), tmp_path / "later")


def refused(path: Path, words: str) -> None:
    """It is not loaded, nothing is overwritten, and no class is another one than before."""
    net, before = model(0.0), [dict(vars(cls)) for cls in CLASSES]
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(net, path)
    assert all(not parameter.any() for parameter in net.parameters())
    assert [dict(vars(cls)) for cls in CLASSES] == before


# ------------------------------------------------------------------------------ opcodes


def _it_would_have(path: Path) -> None:
    """DCP by itself takes the file for tensors once, and runs its code then."""
    first, second = (FileSystemReader(path).read_metadata().state_dict_metadata for _ in range(2))
    changed = [n for n in first if type(first[n]) is not type(second[n])]
    assert [type(second[n]) for n in changed] == [metadata.BytesStorageMetadata]
    assert hasattr(metadata.BytesStorageMetadata, "__setstate__")  # and that it stays, in the whole process
    dcp.load({"model": model(0.0).state_dict()}, storage_reader=FileSystemReader(path))
    assert (path / "ran").exists()
    del metadata.BytesStorageMetadata.__setstate__


@on_ranks(2)
def test_an_index_that_changes_between_two_readings(rank: int, path: Path) -> None:
    if rank == 0:
        put(path, ".metadata", opcodes.two_faced(path, path / "ran"))
    dist.barrier()
    refused(path, r"cannot be loaded: its index \(\.metadata\) is refused: .*do not trust it$")
    assert not (path / "ran").exists()
    dist.barrier()
    _it_would_have(path)


STATE = fields(state_dict_metadata=b"}", storage_data=b"}")
PROGRAMS: dict[str, Callable[..., bytes]] = {
    "a state for a class": lambda _: changed(Metadata, __setstate__=named(Metadata)) + made(Metadata, STATE),
    "a dict for a class": lambda _: named(Metadata) + fields(__setstate__=named(Metadata)) + b"b",
    "a class for an instance": lambda _: made(Metadata, attributes(__class__=named(metadata.StorageMeta))),
    "a state for a dtype": lambda _: named(torch.Size) + b"0ctorch\nfloat32\n" + attributes(x=NONE) + b"b",
    "two states": lambda _: made(Metadata, STATE) + attributes(args=b")", name=value("x")) + b"b",
    "an item of a class": lambda _: named(Metadata) + value("x") + value(1) + b"s",
    "a call of a class": lambda marker: named(metadata.StorageMeta) + value((marker,)) + b"R",
    "keyword arguments": lambda _: named(Metadata) + b")" + fields(version=value("1")) + b"\x92",
    "a function": lambda marker: b"cposix\nmkdir\n" + value((marker,)) + b"R",
    "a function, by INST": lambda marker: b"(" + value(marker) + b"iposix\nmkdir\n",
    "a function, by OBJ": lambda marker: b"(cposix\nmkdir\n" + value(marker) + b"o",
    "a function, by STACK_GLOBAL": lambda marker: (value("posix") + value("mkdir") + b"\x93" + value((marker,)) + b"R"),
    "a name with dots": lambda marker: b"ctorch\nserialization.os.mkdir\n" + value((marker,)) + b"R",
    "getattr": lambda marker: (
        b"cbuiltins\ngetattr\n" + b"(" + named(Metadata) + value("__init__") + b"tR" + value((marker,)) + b"R"
    ),
    "a name of Python 2": lambda marker: b"c__builtin__\napply\n" + value((os.mkdir, (marker,))) + b"R",
    "a persistent name": lambda marker: value(marker) + b"Q",
    "an extension": lambda _: b"\x82\x01",
    **{
        f"the attribute {name}": lambda _, of=of, name=name: value(Evil(getattr, of, name))
        for of, name in ((Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "mro"), (torch.Size, "__subclasses__"))
    },
    "nothing": lambda _: b"",
    "no pickle": lambda _: b"PK\x03\x04",
    "a hole": lambda _: b"h\x07",
    "depth": lambda _: b"(" * 100_000,
}  # fmt: skip


def test_no_opcode_does_anything(path: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for name, program in PROGRAMS.items():
        put(path, ".metadata", b"\x80\x04" + program(str(marker)) + opcodes.END)
        refused(path, r"its index \(\.metadata\) is refused: ")
        assert not marker.exists(), name


def test_an_index_that_would_run_code_is_refused(path: Path, tmp_path: Path) -> None:
    raw = pickle.dumps(Evil(Path.touch, tmp_path / "ran"))
    put(path, ".metadata", raw)
    refused(path, r"it is no index of tensors \(TypeError\); do not trust it")
    assert not (tmp_path / "ran").exists()
    pickle.loads(raw)
    assert (tmp_path / "ran").exists(), "it would have"


def test_no_other_file_of_a_checkpoint_does_either(path: Path, tmp_path: Path) -> None:
    """Files that ``torch.load(…, weights_only=True)`` reads: beside the tensors, the tensors, and a whole model."""
    marker = tmp_path / "ran"
    beside = torch.load(path / "extra.pt", weights_only=True)
    for evil in (
        changed(rebuild, __code__=NONE, x=NONE),
        changed(nn.Parameter, __setstate__=named(rebuild)),
        named(rebuild) + fields(x=NONE) + b"b",
        value(Evil(Path.touch, marker)),
    ):
        raw = _archive(b"\x80\x02" + evil + value(beside) + opcodes.END)
        put(path, "extra.pt", raw)
        refused(path, "cannot be loaded: .*UnpicklingError")
        with pytest.raises(CheckpointError, match="holds something else than tensors"):
            checkpoint.import_file(model(0.0), _written(tmp_path / "one.pt", raw))
        assert not marker.exists()


def test_what_lies_beside_the_tensors_is_what_a_save_writes(path: Path) -> None:
    for wrong in ([1], {"extra": 1, "model": {}}, {"extra": 1, "model": 2, "optimizer": None}):
        buffer = io.BytesIO()
        torch.save(wrong, buffer)
        put(path, "extra.pt", buffer.getvalue())
        refused(path, r"its extra\.pt is not what lpq\.checkpoint\.save writes")


def _archive(program: bytes) -> bytes:
    """A file of ``torch.save`` with this program in it."""
    buffer = io.BytesIO()
    with torch.serialization._open_zipfile_writer(buffer) as archive:
        archive.write_record("data.pkl", program, len(program))
        archive.write_record("byteorder", b"little", 6)
    return buffer.getvalue()


def _written(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


# ------------------------------------------------------------------------------ time and memory


def _nested(times: int) -> bytes:
    """A key of two tuples that are one, so many times: its hash takes 2 to that power of steps."""
    return b"}K\x01" + b"2\x86" * times + b"Ns"


def _nested_by_memo(times: int) -> bytes:
    return b"}K\x01q\x00" + b"".join(b"h%c\x86q%c" % (i, i + 1) for i in range(times)) + b"Ns"


def _wide(path: Path) -> bytes:
    """An index whose every piece lies in the same bytes."""
    found = opcodes.index_of(path)
    tensors = found.state_dict_metadata
    (key,) = (key for key in found.storage_data if key.fqn == NAME)
    for i in range(100):
        tensors[f"model.{i}.more"] = tensors[NAME]
        found.storage_data[metadata.MetadataIndex(f"model.{i}.more", torch.Size((0, 0)))] = found.storage_data[key]
    return pickle.dumps(found)


def test_no_index_takes_more_time_or_memory_than_it_has_bytes(path: Path) -> None:
    raw, plain = (path / ".metadata").read_bytes(), pickle.dumps(opcodes.index_of(path), 2)
    for program, words in (
        (_nested(45), "KeyError"),
        (_nested_by_memo(45), "the name of a tensor is not as an index has it"),
        (b")" + b"\x85" * 100_000 + b"}" + b"Ns", "IndexError|the name of a tensor"),
        (b"}" + b")" + b"\x85" * 100_000 + b"Ns", "the name of a tensor"),
        (b"\x96" + b"\xff" * 4 + b"\x00" * 4, "KeyError"),
    ):
        put(path, ".metadata", raw[:2] + program + raw[2:])
        refused(path, rf"its index \(\.metadata\) is refused: .*({words})")
    put(path, ".metadata", plain[:-1] + b"r" + (2**26).to_bytes(4, "little") + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checkpoint.load(net := model(0.0), path)  # as a memo of few entries, one of which has a large number
    assert net[0].weight[0, 0] == 10.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (100 << 10)
    put(path, ".metadata", _wide(path))
    refused(path, r"its pieces have more bytes than __0_0\.distcp, in which they lie")


def test_no_name_is_looked_up_in_torch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch imports much for some."""
    raw, asked = (path / ".metadata").read_bytes(), list[str]()
    put(path, ".metadata", b"\x80\x02ctorch\nof_nobody\n" + raw[2:])
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    checkpoint.load(model(0.0), path)  # what nothing uses is passed over
    assert "of_nobody" not in asked
    names = b"".join(b"ctorch\nof_nobody%d\n" % i for i in range(1000))
    put(path, ".metadata", b"\x80\x02" + names + raw[2:])
    refused(path, r"it refers to 'torch\.of_nobody100', and to more names than an index has: do not trust it")


def test_no_tuple_is_hashed_for_ever(path: Path, tmp_path: Path) -> None:
    """By files that ``torch.load(…, weights_only=True)`` reads."""
    nested = b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(45))
    for key in (b"K\x01q\x00" + nested, b"K\x01" + b"\x85" * 50_000):
        raw = _archive(b"\x80\x02}" + key + b"Ns.")
        put(path, "extra.pt", raw)
        refused(path, r"its extra\.pt: it has tuples in tuples without end")
        with pytest.raises(CheckpointError, match="tuples in tuples"):
            checkpoint.import_file(model(0.0), _written(tmp_path / "one.pt", raw))
    kept = {"pairs": tuple((i, (i, str(i))) for i in range(3000)), "deep": ((((1,),),),), (1, (2, 3)): [(), {}]}
    saved = checkpoint.save(model(1.0), tmp_path / "honest", extra=kept)
    assert checkpoint.info(saved).extra == kept


@pytest.mark.parametrize("name", ["index.json", "lpq.json", "manifest.json"])
def test_json_that_nests_without_end_is_refused(later: Path, name: str) -> None:
    deep = b"[" * 100_000
    put(later, name, deep) if name != "manifest.json" else (later / name).write_bytes(deep)
    refused(later, r"no index of tensors|its lpq\.json is not the JSON that|its manifest\.json is damaged")


@pytest.mark.parametrize("name", ["index.json", "lpq.json", "manifest.json"])
def test_a_name_that_stands_twice_is_refused(later: Path, name: str) -> None:
    """The last of its entries is what was saved."""
    raw = (later / name).read_bytes()
    raw = raw.replace(b"{", b"{%s:0," % raw[1 : raw.index(b":")].strip(), 1)
    put(later, name, raw) if name != "manifest.json" else (later / name).write_bytes(raw)
    refused(later, r"its manifest\.json is damaged" if name == "manifest.json" else "it has a name twice")


def _deflated(raw: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as archive, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as made:
        for record in archive.infolist():
            made.writestr(record.filename, archive.read(record), compress_type=zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def test_no_record_is_inflated(path: Path, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(torch.zeros(1 << 20), buffer)
    bomb = _deflated(buffer.getvalue())
    found, data = opcodes.index_of(path), (path / "__0_0.distcp").read_bytes()
    kept = (path / "extra.pt").read_bytes()
    put(path, "extra.pt", _deflated(kept))
    refused(path, r"its extra\.pt: it has records that are compressed")
    put(path, "extra.pt", kept)
    (key,) = (key for key in found.storage_data if key.fqn == NAME)
    found.storage_data[key] = replace(found.storage_data[key], offset=len(data), length=16_384)
    put(path, "__0_0.distcp", data + b"\0" * (16_384 - len(bomb)) + bomb)
    put(path, ".metadata", pickle.dumps(found))
    refused(path, r"__0_0\.distcp cannot be read for its piece of 0\.weight: it has records that are compressed")
    (tmp_path / "one.pt").write_bytes(bomb)
    with pytest.raises(CheckpointError, match="records that are compressed"):
        checkpoint.import_file(model(0.0), tmp_path / "one.pt")


def test_a_piece_that_is_another_one_is_named(path: Path) -> None:
    """Its file has its digest, so whoever changed it changed that, too."""
    found, data = opcodes.index_of(path), (path / "__0_0.distcp").read_bytes()
    place = next(place for key, place in found.storage_data.items() if key.fqn == NAME)
    whole = model(1.0)[0].weight.detach()
    for wrong in (torch.zeros(64), [1], torch.zeros(3, 3), whole.bfloat16(), whole.to(torch.int32), whole[:, :-1]):
        buffer = io.BytesIO()
        torch.save(wrong, buffer)
        piece = b"\0" * (place.length - len(buffer.getvalue())) + buffer.getvalue()
        put(path, "__0_0.distcp", data[: place.offset] + piece + data[place.offset + place.length :])
        words = (
            r"partly overwritten: .*__0_0\.distcp cannot be read for its piece of 0\.weight: it differs from the index"
        )
        with pytest.raises(CheckpointError, match=words) as raised:
            checkpoint.load(model(0.0), path)
        assert "line" not in str(raised.value)


# ------------------------------------------------------------------------------ what an index says


class AsOlderPython(pickle.Pickler):
    """Members of enumerations as some releases of Python 3.11 pickle them, among them Debian 12's."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_an_index_that_an_older_python_wrote_is_read(path: Path) -> None:
    raw = io.BytesIO()
    AsOlderPython(raw).dump(opcodes.index_of(path))
    assert b"getattr" in raw.getvalue()
    put(path, ".metadata", raw.getvalue())
    net = model(0.0)
    checkpoint.load(net, path)
    assert all((parameter == 10.0).all() for parameter in net.parameters())


NAME = "model.0.weight"


def _place(**other: Any) -> Callable[[Any], None]:
    """Say something else of where a tensor lies."""

    def change(found: Any) -> None:
        (key,) = (key for key in found.storage_data if key.fqn == NAME)
        found.storage_data[key] = replace(found.storage_data[key], **other)

    return change


def _piece(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Callable[[Any], None]:
    """Say something else of what a tensor is made of."""

    def change(found: Any) -> None:
        found.state_dict_metadata[NAME].chunks[:] = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]

    return change


WRONG: list[tuple[Callable[[Any], object], str]] = [
    (_place(relative_path="../../beside"), r"the file '\.\./\.\./beside', which the manifest does not list"),
    (_place(relative_path="/etc/hostname"), "the file '/etc/hostname', which the manifest does not list"),
    (_place(relative_path="unlisted"), "the file 'unlisted', which the manifest does not list"),
    (_place(offset=10**6), r"beyond the end of __0_0\.distcp"),
    (_place(offset=-1), "a size or a place is not as"),
    (_place(length=True), "a size or a place is not as"),
    (_place(length=7), r"a piece of 0\.weight is not in its files"),
    (_place(transform_descriptors=["zstd"]), "files that are compressed"),
    (_piece((0, 0), (32, 64)), r"the pieces of 0\.weight do not cover it"),
    (_piece((32, 0), (64, 64)), r"a piece of 0\.weight is not in its files"),
    (_piece((0,), (64,)), r"a piece of 0\.weight is not in its files"),
    (_piece((0, 0), (64, 65)), r"a piece of 0\.weight lies outside of it"),
    (lambda found: found.storage_data.clear(), r"a piece of 0\.weight is not in its files"),
    (lambda found: found.state_dict_metadata.update({NAME: metadata.BytesStorageMetadata()}), "no index of tensors"),
    (lambda found: found.state_dict_metadata.update({7: found.state_dict_metadata[NAME]}), "the name of a tensor"),
    (lambda found: setattr(found.state_dict_metadata[NAME], "size", (64, 64)), "no index of tensors"),
    (lambda found: setattr(found.state_dict_metadata[NAME].properties, "dtype", "float32"), "no index of tensors"),
    (lambda found: setattr(found.state_dict_metadata[NAME], "chunks", ()), r"the pieces of 0\.weight do not cover it"),
]


def test_what_is_wrong_in_it_is_refused_before_anything_is_overwritten(path: Path) -> None:
    (path.parent / "beside").write_bytes((path / "__0_0.distcp").read_bytes())
    (path / "unlisted").write_bytes((path / "__0_0.distcp").read_bytes())
    raw = (path / ".metadata").read_bytes()
    for change, words in WRONG:
        found = pickle.loads(raw)
        change(found)
        put(path, ".metadata", pickle.dumps(found))
        refused(path, words)
    put(path, ".metadata", raw)
    checkpoint.load(net := model(0.0), path)
    assert net[0].weight[0, 0] == 10.0


IN_JSON: list[tuple[Callable[[Any], object], str]] = [
    (lambda tensors: tensors[NAME].update(dtype="load"), r"the dtype of 0\.weight is none"),
    (lambda tensors: tensors[NAME].update(shape=[64, -64]), "a size or a place is not as"),
    (lambda tensors: tensors[NAME].update(shape=[64, 64.0]), "a size or a place is not as"),
    (lambda tensors: tensors[NAME].update(shape=[2**70, 64]), r"the pieces of 0\.weight do not cover it"),
    (lambda tensors: tensors[NAME].pop("pieces"), r"its entry of 0\.weight lacks 'pieces'"),
    (lambda tensors: tensors[NAME]["pieces"].clear(), r"the pieces of 0\.weight do not cover it"),
    (lambda tensors: tensors[NAME]["pieces"].append([]), r"a piece of 0\.weight is of type list"),
    (lambda tensors: tensors[NAME]["pieces"][0].update(at=[1, 0]), r"a piece of 0\.weight lies outside of it"),
    (lambda tensors: tensors[NAME]["pieces"][0].update(at=[0]), r"a piece of 0\.weight lies outside of it"),
    (lambda tensors: tensors[NAME]["pieces"][0].update(file="../../beside"), r"'\.\./\.\./beside', which the manifest"),
    (lambda tensors: tensors[NAME]["pieces"][0].update(file=["a"]), "has 'file' of type list"),
    (lambda tensors: tensors[NAME]["pieces"][0].update(bytes=True), "a size or a place is not as"),
    (lambda tensors: tensors[NAME]["pieces"][0].update(bytes=7), r"a piece of 0\.weight is not in its files"),
    (lambda tensors: tensors[NAME]["pieces"][0].update(begin=10**6), r"lies beyond the end of __0_0\.distcp"),
    (lambda tensors: tensors[NAME]["pieces"].extend(tensors[NAME]["pieces"]), r"a piece of 0\.weight is there twice"),
    (lambda tensors: tensors.update({f"x{i}": tensors[NAME] for i in range(9)}), r"more bytes than __0_0\.distcp"),
]


def test_an_index_in_json_is_judged(later: Path) -> None:
    (later.parent / "beside").write_bytes((later / "__0_0.distcp").read_bytes())
    raw = (later / "index.json").read_bytes()
    for change, words in IN_JSON:
        found = json.loads(raw)
        change(found["tensors"])
        put(later, "index.json", json.dumps(found).encode())
        refused(later, rf"its index \(index\.json\) is refused: .*{words}")
    for text in (b"[]", b"{", b"\xff", b'{"tensors": []}', b"[" * 10**6, b"9" * 10**6):
        put(later, "index.json", text)
        refused(later, r"its index \(index\.json\) is refused: it ")
    put(later, "index.json", raw)
    checkpoint.load(net := model(0.0), later)
    assert net[0].weight[0, 0] == 10.0


def test_the_pickle_beside_an_index_in_json_is_not_read(later: Path, path: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for evil in (pickle.dumps(Evil(Path.touch, marker)), b"no pickle"):
        put(later, ".metadata", evil)
        checkpoint.load(net := model(0.0), later)
        assert all((parameter == 10.0).all() for parameter in net.parameters())
        put(path, ".metadata", evil)
        refused(path, r"its index \(\.metadata\) is refused")
    opcodes.listed(later, lambda found: {name: said for name, said in found.items() if name != "index.json"})
    refused(later, r"its manifest\.json does not list index\.json: do not trust it")
    assert not marker.exists()


def test_both_indexes_say_the_same(later: Path) -> None:
    files = {name: (later / name).stat().st_size for name in ("__0_0.distcp", "index.json", ".metadata")}
    found = index.read_index(later, files)
    files.pop("index.json")
    theirs = index.read_index(later, files)
    assert found == theirs
    assert found.state_dict_metadata.keys() == opcodes.index_of(later).state_dict_metadata.keys()
    assert {key: place.offset for key, place in found.storage_data.items()} == {
        key: place.offset for key, place in opcodes.index_of(later).storage_data.items()
    }


def test_a_piece_that_is_there_twice_is_refused(path: Path) -> None:
    found = opcodes.index_of(path)
    entries = [(value(key), value(place)) for key, place in found.storage_data.items()]
    twice = b"}(" + b"".join(key + place for key, place in [*entries, entries[0]]) + b"u"
    tensors = table({value(name): value(entry) for name, entry in found.state_dict_metadata.items()})
    whole = fields(state_dict_metadata=tensors, storage_data=twice)
    put(path, ".metadata", b"\x80\x02" + made(Metadata, whole) + opcodes.END)
    refused(path, "twice: do not trust it")


def test_files_that_lie_elsewhere_or_are_not_listed_are_refused(path: Path, tmp_path: Path) -> None:
    data = path / "__0_0.distcp"
    beside = tmp_path / "beside"
    data.rename(beside)
    for there in (beside, Path("..", "..", "beside")):
        data.symlink_to(there)
        refused(path, r"__0_0\.distcp: it is a link to a file outside of the checkpoint")
        data.unlink()
    os.mkfifo(data)  # which nobody must wait for
    refused(path, r"__0_0\.distcp: it is no ordinary file")
    data.unlink()
    beside.rename(path / "data")
    data.symlink_to("data")  # within the checkpoint it may lie where it likes
    checkpoint.load(model(0.0), path)
    raw = (path / "manifest.json").read_bytes()
    for name in (".metadata", "lpq.json", "extra.pt"):
        opcodes.listed(path, lambda files: {n: said for n, said in files.items() if n != name})  # noqa: B023
        refused(path, rf"its manifest\.json does not list {name}")
        (path / "manifest.json").write_bytes(raw)
    for name in ("../beside", str(beside), "", "..", "a/b", "a\0b"):
        opcodes.listed(path, lambda files: {**files, name: files["extra.pt"]})  # noqa: B023
        refused(path, "is not the name of a file in it")
        (path / "manifest.json").write_bytes(raw)
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(raw)
    (path / "manifest.json").unlink()
    (path / "manifest.json").symlink_to(manifest)
    refused(path, r"manifest\.json: it is a link to a file outside")
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")
    refused(path, r"manifest\.json: it is no ordinary file")
