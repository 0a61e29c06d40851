"""Reports on experts follow from the declared kernels and one measured rule."""

from __future__ import annotations

import pytest
from torch import nn

import lpq
from lpq.nn import GroupedLinear
from lpq.nn.expert_notes import expert_note
from lpq.operations.group_choice import EXACT_FROM, pays_from

LARGE, SMALL = (14336, 4096), (1408, 2048)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("fp8-row", "fprop, dgrad, wgrad of codes; 4096 x 14336 is faster than in bf16 from about 1100 rows"),
        ("fp8-current", "dgrad, wgrad in bf16: torch multiplies rows in groups in E4M3 alone, and not in E5M2"),
        ("fp8-block", "in bf16: torch has no grouped product for scales of blocks; slower than a layer without"),
        ("mxfp8", "no kernel multiplies codes of mxfp8 in groups; slower than a layer without a recipe"),
        ("fp8-row-bf16-wgrad", "wgrad in bf16: an operand is not encoded"),
    ],
)
def test_the_way_of_each_product_is_said(recipe: str, words: str) -> None:
    assert words in expert_note(lpq.recipe(recipe), [LARGE])


def test_small_experts_need_more_rows_or_never_pay() -> None:
    large, small = pays_from(3, *LARGE), pays_from(3, *SMALL)
    assert large is not None
    assert small is not None
    assert EXACT_FROM <= large < 2048 < small
    assert pays_from(1, *SMALL) is None
    assert "2048 x 1408 is slower than in bf16, however many rows" in expert_note(lpq.recipe("fp8-current"), [SMALL])


def test_a_report_has_a_line_for_experts() -> None:
    model = nn.ModuleDict({"up": GroupedLinear(4, 64, 128, recipe=None), "head": nn.Linear(8, 8)})
    lpq.convert(model, "fp8-row")
    report = lpq.report(model)
    assert [entry.name for entry in report.experts] == ["up"]
    assert "experts  up: fprop, dgrad, wgrad of codes; 64 x 128 is slower than in bf16" in str(report)
