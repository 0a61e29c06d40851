"""A compiler keeps programs on disk. What it compiled before a format declared another layout is of no use then."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lpq_mxfp8 import storage
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config

import lpq
from lpq import operations, registry


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the compiler keeps what it compiles."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    if not config.fx_graph_cache:
        pytest.skip("the compiler is told by its environment to keep nothing")
    yield tmp_path
    torch._dynamo.reset()
    registry.refresh()


def scale_when_compiled(x: Tensor) -> Tensor:
    """As by a new process, in which nothing but the folder is left."""
    registry.refresh()
    torch._dynamo.reset()
    counters.clear()
    side = lpq.quantizer("mxfp8").side("row")

    def encode(x: Tensor) -> Tensor:
        row, _, _ = operations.quantize(x, None, side, None)
        assert row is not None
        return row.tensors()[1]

    with torch.no_grad():
        return torch.compile(encode, fullgraph=True)(x)


def test_a_program_for_another_layout_is_compiled_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 96)
    by_columns = scale_when_compiled(x)
    assert by_columns.stride() == (1, 64)
    assert scale_when_compiled(x).stride() == (1, 64)
    assert counters["inductor"]["fxgraph_cache_hit"] == 1  # else this says nothing of what is on disk
    by_rows = dataclasses.replace(storage.SCALE, column_major=False)
    monkeypatch.setattr(storage, "LAYOUTS", {name: (data, by_rows) for name, (data, _) in storage.LAYOUTS.items()})
    again = scale_when_compiled(x)
    assert again.stride() == (3, 1)
    assert torch.equal(again, by_columns)
