"""Schemes of a plugin that do not do what they declare: the error names the plugin, the tensor and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lpq
from lpq import registry
from lpq.checkpoint import CheckpointError
from lpq.registry import Part

WRITES: dict[str, tuple[Callable[[Any], Sequence[Any]], str]] = {
    "dtype": (
        lambda s: (s.data.view(torch.uint8), s.scale),
        r"writes up\.weight as torch\.uint8 \[64, 64\], and parts declares torch\.float8_e4m3fn \[64, 64\]",
    ),
    "shape": (
        lambda s: (s.data, s.scale[1:]), r"weight_scale as torch\.uint8 \[63, 2\], and parts declares .*\[64, 2\]",
    ),
    "none": (lambda s: (s.data, None), r"writes up\.weight_scale as NoneType"),
    "fewer": (lambda s: (s.data,), r"writes 1 tensor, and parts declares 2"),
    "more": (lambda s: (s.data, s.scale, s.scale), r"writes 3 tensors, and parts declares 2"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRITES)
def test_what_is_written_is_what_is_declared(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, words = WRITES[fault]
    model = lpq.convert(nn.ModuleDict({"up": nn.Linear(64, 64, bias=False)}), "mxfp8")
    lpq.export(model, tmp_path / "right")
    schemes = tuple(replace(scheme, write=write) for scheme in registry.schemes("mxfp8"))
    monkeypatch.setattr(registry, "schemes", lambda name: schemes)
    with pytest.raises(
        CheckpointError, match=rf"plugin mxfp8 .*its scheme 'MXFP8' .*{words}.*Remedy: return from write"
    ):
        lpq.export(model, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_a_part_holds_what_is_known() -> None:
    with pytest.raises(ValueError, match="part 'weight' has holds='code': choose from codes, scales, exponents, value"):
        Part(name="weight", dtype=torch.uint8, shape=lambda rows, cols: (rows, cols), holds="code")  # type: ignore[arg-type]
