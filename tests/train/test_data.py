"""The text is the same on every start, and a batch follows from seed and step alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from lpq.train import TrainError, data


def test_the_default_text_is_the_standard_library_and_nothing_beside_it() -> None:
    files = list(data.standard_library())
    names = [p.name for p in files]
    assert "argparse.py" in names
    assert "dataclasses.py" in names
    assert all(p.suffix == ".py" for p in files)
    assert not any({"site-packages", "dist-packages", "test", "__pycache__"} & set(p.parts) for p in files)
    assert files == list(data.standard_library())
    assert sum(map(len, data.read(iter(files), 1 << 30).values())) > 5_000_000


def test_what_is_installed_follows_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ["stdlib/os.py", "purelib/a.rst", "purelib/pkg/b.py", "purelib/pkg/sub/c.cu"]
    lpqs = ["purelib/lpq/csrc/rows.cu", "purelib/lpq_fp8/quantizer.py", "purelib/lpq-0.1.0.dist-info/top_level.txt"]
    for name in (*kept, *lpqs, "stdlib/test.md", "purelib/pkg/code.so", "purelib/pkg/__pycache__/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.setattr(data.sysconfig, "get_path", lambda kind: str(tmp_path / kind))
    files = [str(path.relative_to(tmp_path)) for path in data.named_files(["installed"])]
    assert files == kept


def test_a_directory_is_read_in_order_and_capped(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("c.txt", "b/z.txt", "a.txt"):
        (tmp_path / name).write_text(name)

    def read(*names: str, most: int = 100) -> list[bytes]:
        return list(data.read(data.named_files([str(tmp_path / name) for name in names]), most).values())

    assert read("") == [b"a.txt", b"b/z.txt", b"c.txt"]
    assert read("c.txt", "a.txt") == [b"c.txt", b"a.txt"]
    assert read("", most=7) == [b"a.txt", b"b/"]
    (tmp_path / "b" / "copy of a").write_text("a.txt")
    assert read("") == [b"a.txt", b"b/z.txt", b"c.txt"]


def test_a_batch_is_a_function_of_seed_and_step(text: Path) -> None:
    one, two = data.load([str(text)], 16), data.load([str(text)], 16)
    tokens, targets = one.batch(3, 7, 4, 16)
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    random.seed(1)
    torch.manual_seed(1)
    two.batch(3, 6, 4, 16)
    again, _ = two.batch(3, 7, 4, 16)
    assert torch.equal(tokens, again)
    for seed, step in ((3, 8), (4, 7), (7, 3)):
        assert not torch.equal(tokens, one.batch(seed, step, 4, 16)[0])


def test_the_held_out_text_is_never_trained_on(text: Path) -> None:
    loaded = data.load([str(text)], 16)
    assert bytes(loaded.train.tolist()) + bytes(loaded.held_out.tolist()) == text.read_bytes()
    assert 0.04 < len(loaded.held_out) / len(text.read_bytes()) < 0.06
    tokens, targets = loaded.held_out_batch(0, 2, 16)
    for row in torch.cat([tokens, targets[:, -1:]], dim=1):
        assert bytes(row.tolist()) in bytes(loaded.held_out.tolist())


def test_of_many_files_whole_ones_are_held_out_by_their_contents(tmp_path: Path) -> None:
    """So a file is on the same side wherever it lies, and no copy of it is on the other."""
    for i in range(400):
        (tmp_path / f"{i}").write_text(f"file {i}, which is one of four hundred\n")
        (tmp_path / f"again {i}").write_text(f"file {i}, which is one of four hundred\n")
    loaded = data.load([str(tmp_path)], 16)
    train, held_out = (bytes(part.tolist()).decode().splitlines() for part in (loaded.train, loaded.held_out))
    assert len(train) + len(held_out) == len({*train, *held_out}) == 400
    assert 8 < len(held_out) < 40
    (tmp_path / "moved").mkdir()
    (tmp_path / "0").rename(tmp_path / "moved" / "zero")
    moved = data.load([str(tmp_path)], 16)
    assert {*bytes(moved.held_out.tolist()).decode().splitlines()} == {*held_out}


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"nowhere is neither a file nor a directory: name one that is there"):
        data.load([str(tmp_path / "nowhere")], 16)
    (tmp_path / "short").write_text("too short")
    with pytest.raises(TrainError, match=r"has 9 bytes; sequences of 16 need at least 360"):
        data.load([str(tmp_path / "short")], 16)


def test_the_least_text_that_is_accepted_gives_batches(tmp_path: Path) -> None:
    (tmp_path / "least").write_bytes(bytes(360))
    least = data.load([str(tmp_path / "least")], 16)
    assert least.batch(0, 0, 2, 16)[0].shape == least.held_out_batch(0, 2, 16)[0].shape == (2, 16)
