"""The tables that people read: each command fits a screen, and ``--full`` leaves nothing out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lpq import registry
from lpq.registry.tables import drawn


@pytest.mark.parametrize(
    "command",
    [("doctor", "--all"), ("doctor", "nvfp4"), ("explain", "nvfp4"), ("explain", "fp8-current"), ("memory",)],
    ids=" ".join,
)
def test_it_fits_a_screen(command: tuple[str, ...], lpq: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = lpq(*command, *(("--device", "cpu") if command[0] != "memory" else ())).out.splitlines()
    assert 10 < len(lines) <= 50
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("command", ["formats", "recipes", "plugins", "memory"])
def test_a_narrow_terminal_has_records_in_place_of_tables(
    command: str, lpq: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = lpq(command).out.split()
    monkeypatch.setenv("COLUMNS", "50")
    narrow = lpq(command).out
    assert max(map(len, narrow.splitlines())) <= 50
    words = {word for word in wide if word.strip("─")} - {"name"}  # which stands above no record
    assert words <= set(narrow.split()), "a word is broken or lost"
    monkeypatch.setenv("COLUMNS", "70")
    assert "─" in lpq(command).out
    assert "─" not in narrow


def test_words_of_the_first_column_are_whole_at_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of layers in a report, where one also tells of another recipe."""
    names, format_text = [f"blocks.{i}.attention.qkv if mxfp4" for i in range(3)], "mxfp4(scale=ceil, stochastic=true)"
    heads, numbers = ("layer", *"abcdefghij", "format"), ["1234.567"] * 10
    tables = 0
    for width in range(70, 190):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = drawn("title", heads, [[name, *numbers, format_text] for name in names]).splitlines()
        assert {"blocks.2.attention.qkv", "mxfp4"} <= {word for line in lines for word in line.split()}, width
        assert max(map(len, lines)) <= width
        tables += any("─" in line for line in lines)
    assert 20 < tables < 100


def test_a_remark_about_many_kernels_is_made_once(lpq: Callable) -> None:
    found = lpq("doctor", "--all", "--device", "cpu").out
    assert found.count("runs on cuda, not on cpu") == 1
    assert "a  cuda, torch, triton: runs on cuda, not on cpu" in found
    (line,) = [line for line in found.splitlines() if line.split()[:1] == ["decode"]]
    assert line.split() == ["decode", "reference", "a", "–", *["reference", "a"] * 3]


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


# ---------------------------------------------------------------------------------------------- full


REASON = "runs on cuda, not on cpu"


def test_doctor_gives_each_operation_a_row_and_each_kernel_its_reason(lpq: Callable) -> None:
    found = json.loads(lpq("doctor", "--device", "cpu", "--json").out)
    served = [*found["kernels"], *found["pairs"]]
    short, full = (lpq("doctor", "--device", "cpu", *more).out for more in (("--all",), ("--full",)))
    reasons = [f"{entry['impl']}: {entry['reason'].partition(' (')[0]}" for s in served for entry in s["why_not"]]
    assert len(reasons) > 50
    for reason in set(reasons):
        assert full.count(reason) == reasons.count(reason)
        assert reason not in short
    rows = [line.split() for line in full.splitlines()]
    for operation in ("measure", "gemm", "grouped_gemm"):
        assert sum(operation in row for row in rows) == sum(s["op"] == operation for s in served)
    assert "\nremember: the statistics of a step" in full


@pytest.mark.parametrize(("command", "rows"), [(("explain", "fp8-current"), 3), (("doctor", "fp8"), 1)], ids=str)
def test_steps_that_run_alike_have_rows_of_their_own(lpq: Callable, command: tuple[str, ...], rows: int) -> None:
    short, full = (lpq(*command, "--device", "cpu", *more).out for more in ((), ("--full",)))
    kernel = "cuda lpq_fp8.cuda:quantize"
    assert (short.count(f"{kernel}, "), short.count(f"{kernel}: {REASON}")) == (1, 0)
    assert (full.count(f"{kernel}, "), full.count(f"{kernel}: {REASON}")) == (0, rows)


def test_plugins_are_listed_with_what_they_bring(lpq: Callable) -> None:
    short, full = (lpq("plugins", *more).out for more in (("--all",), ("--full",)))
    for plugin in registry.plugins():
        for name in (*plugin.recipes, *(f"{k.op}: {k.backend} {k.impl}" for k in plugin.kernels)):
            assert name in full
    assert "fp8-row-bf16-wgrad" not in short
