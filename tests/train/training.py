"""Helpers of the tests of training, beside the fixtures."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lpq.train import TrainConfig

MakeConfig = Callable[..., TrainConfig]
POLICY = """
[[rules]]
match = "blocks.*.mlp.*"
until = 0.5
recipe = "fp8-delayed"

[[rules]]
match = "*"
recipe = "nvfp4"
"""
"""Amax histories, which come and go with the recipe and on which all ranks must agree, and rounding with random bits,
which each rank has of its own."""


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def saved(directory: Path, step: int = 6) -> dict[str, Any]:
    """Read a checkpoint by PyTorch alone: whole tensors, and the files beside them."""
    path = directory / f"step-{step:08d}"
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(str(path), f"{folder}/whole.pt")
        tensors: dict[str, Any] = torch.load(f"{folder}/whole.pt", weights_only=True)
    return {"tensors": tensors, "beside": torch.load(path / "extra.pt", weights_only=True)}


def assert_same(a: object, b: object, at: str = "state") -> None:
    """The two are equal, tensors to the bit."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), at
        assert a.dtype == b.dtype, at
        assert torch.equal(a, b), at
    elif isinstance(a, dict):
        assert isinstance(b, dict), at
        assert a.keys() == b.keys(), at
        for key in a:
            assert_same(a[key], b[key], f"{at}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), at  # type: ignore[arg-type]
        for i, (x, y) in enumerate(zip(a, b, strict=True)):  # type: ignore[arg-type]
            assert_same(x, y, f"{at}[{i}]")
    else:
        assert a == b, at
