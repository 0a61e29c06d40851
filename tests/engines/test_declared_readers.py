"""The programs that schemes declare as their readers: what the documentation says of them, and which tests show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from engines_table import scheme_of
from tiny import Net
from torch import nn

import lpq
from lpq import registry
from lpq.checkpoint import CheckpointError


def test_each_scheme_that_transformers_reads_is_read_by_it_in_a_test() -> None:
    declared = {
        (scheme.layout, scheme.title, scheme.quantizer)
        for format in registry.formats()
        for scheme in registry.schemes(format)
        if "transformers" in scheme.readers and scheme.unwritten is None
    }
    shown = {case: scheme_of(case.recipe, case.layout) for case in tiny.READ_BY_TRANSFORMERS}
    assert declared == {(s.layout, s.title, s.quantizer) for s in shown.values() if s is not None}
    assert all("transformers" in s.readers for s in shown.values() if s is not None)


def test_a_record_has_the_programs_that_read_all_layers(tmp_path: Path) -> None:
    model = lpq.convert(Net(dtype=torch.bfloat16), tiny.MIXTURE)
    mixed = lpq.export(model, tmp_path / "mixed")
    assert mixed.readers == ("vLLM", "transformers")
    assert "compressed-tensors, read by vLLM, transformers\n" in str(mixed)
    nvfp4 = lpq.convert(Net(dtype=torch.bfloat16), "nvfp4")
    amax = dict.fromkeys(tiny.layers(nvfp4), 3.75)
    for given, more in (({}, ()), (amax, ("TensorRT-LLM",))):
        made = lpq.export(nvfp4, tmp_path / f"nvfp4-{len(given)}", layout="modelopt", input_amax=given)
        assert made.readers == ("vLLM", "SGLang", *more)


# ---------------------------------------------------------------------------------------------- scheme faults


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
