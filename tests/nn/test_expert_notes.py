"""Reports on experts follow from the declared kernels and one measured rule."""

from __future__ import annotations

import pytest
from torch import nn

import lpq
from lpq.nn import GroupedLinear
from lpq.nn.layer_notes import expert_note
from lpq.operations.group_choice import pays_from

LARGE, SMALL = (14336, 4096), (1408, 2048)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("fp8-row", "fprop, dgrad, wgrad of codes; 4096 x 14336 is faster than in bf16 from about 750 rows"),
        ("fp8-current", "fprop, dgrad, wgrad of codes; 4096 x 14336 is faster"),
        ("fp8-block", "fprop, dgrad, wgrad of codes; 4096 x 14336 is faster"),
        (
            "x=fp8(scaling=block), w=fp8(), dy=fp8()",
            "dgrad of codes; fprop, wgrad in bf16: torch has no grouped product for scales of blocks",
        ),
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
    assert large < 2048 < small
    assert pays_from(1, *SMALL) is None
    one_product = lpq.recipe("fprop=fp8-current, dgrad=bf16, wgrad=bf16")
    assert "2048 x 1408 is slower than in bf16, however many rows" in expert_note(one_product, [SMALL])


def test_a_report_has_a_line_for_experts() -> None:
    model = nn.ModuleDict({"up": GroupedLinear(4, 64, 128, recipe=None), "head": nn.Linear(8, 8)})
    lpq.convert(model, "fp8-row")
    report = lpq.report(model)
    assert [entry.name for entry in report.experts] == ["up"]
    assert "experts  up: fprop, dgrad, wgrad of codes; 64 x 128 is slower than in bf16" in str(report)
    assert "; measured on an H100" in str(report)
