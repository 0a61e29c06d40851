"""The tables that people read: ``lpq explain``, and that each command fits a screen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "command",
    [("doctor",), ("doctor", "nvfp4"), ("explain", "nvfp4"), ("explain", "fp8-current"), ("memory",)],
    ids=" ".join,
)
def test_it_fits_a_screen(command: tuple[str, ...], lpq: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = lpq(*command, *(("--device", "cpu") if command[0] != "memory" else ())).out.splitlines()
    assert 10 < len(lines) <= 45
    assert max(map(len, lines)) <= 100


def test_a_remark_about_many_kernels_is_made_once(lpq: Callable) -> None:
    found = lpq("doctor", "--device", "cpu").out
    assert found.count("runs on cuda, not on cpu") == 1
    assert "a  cuda, torch, triton: runs on cuda, not on cpu" in found
    (line,) = [line for line in found.splitlines() if line.split()[:1] == ["decode"]]
    assert line.split() == ["decode", "reference", "a", "–", "reference", "a", "reference", "a"]


def test_a_reason_that_several_steps_have_stands_below_the_table(
    lpq: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = lpq("explain", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16", "--device", "cpu").out.splitlines()
    assert len(lines) < 40
    assert [line for line in lines if line.startswith("b  ")] == ["b  runs on cuda, not on cpu"]
    assert sum("(b)" in line for line in lines) > 3


def test_explain_prints_tables(lpq: Callable) -> None:
    out = lpq("explain", "nvfp4", "--device", "cpu").out
    for word in (
        "dw = dy.col · x.col",
        "nvfp4(rht=true, stochastic=true)",
        "reference",
        "quantize dy.row, dy.col",
    ):
        assert word in out


@pytest.mark.parametrize("recipe", ["fprop=mxfp8, dgrad=nvfp4, wgrad=bf16", "bf16", "nvfp4"])
def test_explain_breaks_no_quantizer_in_a_narrow_terminal(
    recipe: str, lpq: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = lpq("explain", recipe, "--device", "cpu").out.split("What runs on")[0].split()
    gemms = json.loads(lpq("explain", recipe, "--device", "cpu", "--json").out)["gemms"]
    assert {word for gemm in gemms.values() for text in gemm.values() for word in text.split()} <= set(words)


def test_explain_takes_a_column_operand_from_the_row_operand(lpq: Callable) -> None:
    recipe = "x=hybrid(row=mxfp8, col=nvfp4, col_source=row), w=mxfp8(), dy=mxfp8()"
    steps = json.loads(lpq("explain", recipe, "--device", "cpu", "--json").out)["runs"]
    assert {"quantize x.row", "quantize x.col"} <= set(steps)


def test_explain_reads_a_file(lpq: Callable, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('fprop = "mxfp8"\ndgrad = "mxfp8"\nwgrad = "bf16"\n')
    found = json.loads(lpq("explain", str(path), "--device", "cpu", "--json").out)
    assert found["name"] == "mine"
