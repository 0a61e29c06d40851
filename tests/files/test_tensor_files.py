"""A file of tensors is written in any order, and is read without being mapped to memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lpq.files.errors import CheckpointError
from lpq.files.safetensors import NAMES, Reader, TensorKind, Writer


def write(path: Path, found: dict[str, Tensor]) -> None:
    writer = Writer(path, {name: TensorKind.of(t) for name, t in found.items()})
    for name, tensor in reversed(found.items()):
        writer.add(name, tensor)
    writer.close()


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    found = {str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in NAMES}
    found |= {"empty": torch.empty(0, 3), "one": torch.tensor(2.0)}
    write(file, found)
    reader = Reader(file)
    assert {*reader.tensors} == {*found}
    for name, tensor in found.items():
        read = reader.read(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """If its bytes were mapped to memory the process would end by a signal."""
    file = tmp_path / "x.safetensors"
    write(file, {"weight": torch.ones(1 << 20)})
    reader = Reader(file)
    assert torch.equal(reader.read("weight"), torch.ones(1 << 20))
    os.truncate(file, 1000)
    with pytest.raises(CheckpointError, match=r"x\.safetensors was changed while it was read: .*weight"):
        reader.read("weight")
