"""``lpq memory``: the report as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lpq.cli.memory import unit_for
from lpq.cli.shapes import SHAPES


def test_llama_under_nvfp4_is_a_table(lpq: Callable) -> None:
    ended = lpq("memory", "--recipe", "nvfp4", "--ranks", "8")
    assert (ended.status, ended.err) == (0, "")
    (row,) = [line.split() for line in ended.out.splitlines() if "whole: the converted weights" in line]
    assert row[-6:] == ["13.00", "100%", "3.28", "25%", "3.28", "25%"]
    assert "8,030,261,248 parameters; 6,979,321,856 are converted" in ended.out
    assert "in GiB" in ended.out
    assert "stored quantized: a rank holds 103% of what it holds in bf16. Its fp32 masters take as" in ended.out
    assert "gathered quantized: " not in ended.out, "which holds no more"


def test_moments_are_counted_in_their_formats(lpq: Callable) -> None:
    def moments(*options: str) -> int:
        found = json.loads(lpq("memory", "tiny", "--recipe", "fp8-current", "--json", *options).out)
        return found["stored quantized"]["moments"]  # type: ignore[no-any-return]

    first = ("--exp-avg", "mxfp8")
    second = ("--exp-avg-sq", "fp8(scaling=block, pow2=false)")
    assert moments() > moments(*first) > moments(*first, *second)
    assert moments() - moments(*first) == pytest.approx(moments() / 2 * (1 - 33 / 128), rel=0.01)


def test_its_numbers_are_bytes_in_json(lpq: Callable) -> None:
    found = json.loads(lpq("memory", "tiny", "--recipe", "fp8-current", "--ranks", "2", "--json").out)
    assert list(found) == ["bf16", "gathered quantized", "stored quantized"]
    for way in ("gathered quantized", "stored quantized"):
        assert found[way]["share"] == pytest.approx(0.5, rel=1e-3)
        assert found[way]["backward"] == pytest.approx(found["bf16"]["backward"] / 2, rel=0.01)
    assert found["stored quantized"]["weights"] < found["gathered quantized"]["weights"]
    for memory in found.values():
        parts = ("weights", "masters", "gradients", "moments")
        assert memory["total"] == sum(memory[part] for part in parts)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_can_be_asked_for(shape: str, lpq: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few of its layers."""
    monkeypatch.setitem(SHAPES, shape, replace(SHAPES[shape], layers=2))
    assert lpq("memory", shape, "--recipe", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16", "--ranks", "64").status == 0


def test_a_policy_is_no_recipe(tmp_path: Path, lpq: Callable) -> None:
    (tmp_path / "policy.toml").write_text('[[rules]]\nmatch = "*"\nrecipe = "mxfp8"\n')
    ended = lpq("memory", "tiny", "--recipe", str(tmp_path / "policy.toml"))
    assert ended.status == 2
    assert "is a policy and not a recipe, since this file has rules: give the recipe of one of its rules" in ended.err


def test_the_unit_is_the_largest_that_fits_and_no_bytes_have_one() -> None:
    units = {0: "bytes", 1: "bytes", 1023: "bytes", 1024: "KiB", 2**20: "MiB", 2**30 - 1: "MiB", 2**50: "GiB"}
    assert {count: unit_for(count)[0] for count in units} == units
