"""``lpq advise``: predictions for a model on meta, and a line that works when it is pasted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import lpq as library
from lpq.bench.gpus import GPUS
from lpq.cli import advise as command
from lpq.cli.shapes import SHAPES


@pytest.fixture(autouse=True)
def _few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "llama-3-8b", replace(SHAPES["llama-3-8b"], layers=2, vocabulary=1024))


def advised(lpq: Callable, *arguments: object) -> dict:
    ended = lpq("advise", *arguments, "--json")
    assert (ended.status, ended.err) == (0, "")
    return json.loads(ended.out)


def test_a_wide_model_on_a_measured_gpu_is_given_a_line_to_paste(lpq: Callable) -> None:
    found = advised(lpq, "llama-3-8b", "--gpu", "h100", "--world", 8)
    assert found["line"] == 'lpq.convert(model, "fp8-current", weights="high_precision")'
    assert found["measured_rates"]
    assert found["gain"]["fp8-current"] == pytest.approx(1.5, abs=0.1)
    assert found["gain"]["mxfp8"] < 1, "which an H100 multiplies in bf16"
    assert {(g["layers"], g["count"]) for g in found["layers"]} >= {("blocks.*.q_proj", 2), ("blocks.*.down_proj", 2)}
    assert found["gathered_bytes"]["fp8-current"] / found["gathered_bytes"]["bf16"] == pytest.approx(0.5, abs=0.02)
    table = lpq("advise", "llama-3-8b", "--gpu", "h100", "--world", 8)
    assert table.out.splitlines()[-1] == found["line"]
    assert "The rates of the H100 SXM are measured" in table.out


def test_its_tables_break_no_number_and_no_name_on_a_usual_screen(
    lpq: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = lpq("advise", "llama-3-8b", "--gpu", "h100", "--world", 8).out.splitlines()
    (heading,) = [line.split() for line in lines if line.startswith("layers  ")]
    assert heading[-5:] == ["current", "row", "block", "mxfp8", "nvfp4"]
    (row,) = [line.split() for line in lines if line.startswith("blocks.*.gate_proj")]
    assert row[1:3] == ["2", "4096x14336"]
    assert len(row) == 9
    assert max(map(len, lines)) <= 80


def test_narrow_layers_are_left_out_by_the_line(lpq: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "llama-3-8b", replace(SHAPES["llama-3-8b"], kv_heads=1))
    found = advised(lpq, "llama-3-8b", "--gpu", "h200", "--recipe", "fp8-current")
    assert found["leave_out"] == ["blocks.*.k_proj", "blocks.*.v_proj"]
    model = command.on_meta("llama-3-8b", "")
    exec(found["line"], {"lpq": library, "model": model})
    converted = {name for name, module in model.named_modules() if isinstance(module, library.nn.Linear)}
    assert {name.rpartition(".")[2] for name in converted} == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_a_gpu_that_nobody_measured_is_called_so(lpq: Callable) -> None:
    found = advised(lpq, "llama-3-8b", "--gpu", "B200", "--tokens", 16384)
    assert not found["measured_rates"]
    assert any("Nobody measured lpq on the B200" in sentence for sentence in found["remarks"])
    assert found["line"] == 'lpq.convert(model, "mxfp8")'
    assert any("nvfp4: faster still, with codes of 4 bits" in sentence for sentence in found["remarks"])


def test_where_nothing_is_gained_it_says_to_stay_in_bf16(lpq: Callable) -> None:
    for gpu in ("mi300", "a100"):
        found = advised(lpq, "tiny", "--gpu", gpu)
        assert found["line"] is None
        assert "Stay in bf16 here: no recipe saves time for these layers." in found["remarks"]


def test_layers_are_measured_where_the_gpu_is_here(lpq: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "gpu_named", lambda gpu, option: (GPUS["h100"], True))
    monkeypatch.setattr(command, "_measured", lambda groups, recipes: {g.size: {recipes[0]: 1.25} for g in groups})
    out = lpq("advise", "tiny", "--recipe", "fp8-current").out
    assert out.count("(1.25)") == 7


def experts() -> nn.Module:
    return nn.ModuleDict({"experts": library.nn.GroupedLinear(4, 32, 32, recipe="mxfp8"), "o_proj": nn.Linear(64, 64)})


def test_experts_are_named_and_not_predicted(lpq: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    found = advised(lpq, "test_advise:experts", "--gpu", "h100")
    assert [g["layers"] for g in found["layers"]] == ["o_proj"]
    assert any(sentence.startswith("Experts are not predicted (experts)") for sentence in found["remarks"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_must_be_named(lpq: Callable) -> None:
    ended = lpq("advise", "tiny")
    assert ended.status == 2
    assert "--gpu: name one of h100, h200" in ended.err
