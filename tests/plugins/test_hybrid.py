"""Hybrid: two quantizers in one, which is exactly each of them on its side."""

from __future__ import annotations

import pytest
import torch
from nasty import normal
from support.comparing import equal, equal_operands

import lpq
from lpq import registry
from lpq.core import Quantizer, Storage, transpose
from lpq.registry.errors import LpqError, OptionError, UnknownFormat

REMEMBER = [
    "fp8(scaling=delayed, history=2)", "fp8(scaling=delayed, history=3, margin=1, algo=most_recent)",
    "hybrid(row=fp8(scaling=delayed, history=2), col=nvfp4(stochastic=true))",
]  # fmt: skip


def twice(text: str) -> Quantizer:
    """The same quantizer on both sides."""
    return lpq.quantizer("hybrid", row=text, col=text)


# ------------------------------------------------------------------------------ hybrid(row=A, col=A) is A


@pytest.mark.parametrize("text", [*REMEMBER, "nvfp4(rht=true)", "hybrid(row=nvfp4, col=mxfp8, col_source=row)"])
def test_the_same_twice_has_the_same_sides(text: str) -> None:
    """So it encodes alike, as the conformance kit asks of every format beside itself and beside every other one."""
    a, hybrid = lpq.quantizer(text), twice(text)
    assert (hybrid.side("row"), hybrid.side("col")) == (a.side("row"), a.side("col"))
    assert lpq.quantizer(f"hybrid(row={text}, col={text})") == hybrid


@pytest.mark.parametrize("text", REMEMBER)
def test_the_same_twice_remembers_the_same(text: str) -> None:
    a, hybrid = lpq.quantizer(text), twice(text)
    states = a.new_state(), hybrid.new_state()
    assert list(states[0]) == list(states[1])
    for step in range(5):
        x = normal(16, 48, seed=step) * 4.0**step
        t, u = (q.quantize(x, state=s or None, seed=step) for q, s in zip((a, hybrid), states, strict=True))
        assert equal_operands(t.row, u.row)
        assert equal_operands(t.col, u.col)
        assert equal(*(s.values() for s in states))


# ------------------------------------------------------------------------------ two different sides


def test_each_side_keeps_its_own_state() -> None:
    hybrid = lpq.quantizer("hybrid(row=fp8(scaling=delayed, history=2), col=fp8(scaling=delayed, history=3))")
    state = hybrid.new_state()
    shapes = {name: tuple(t.shape) for name, t in state.items()}
    assert shapes == {"row_amax_history": (2,), "row_amax": (), "col_amax_history": (3,), "col_amax": ()}
    hybrid.quantize(torch.full((4, 4), 5.0), state=state, col=False)
    assert (state["row_amax"], state["col_amax"]) == (5, 0)
    hybrid.quantize(torch.full((4, 4), 7.0), state=state)
    assert (state["row_amax"], state["col_amax"]) == (7, 7)


def test_encoding_the_decoded_row_operand_is_not_encoding_the_original() -> None:
    x = normal(40, 70)
    original, row = (
        lpq.quantizer("hybrid(row=nvfp4, col=mxfp8)", col_source=s).quantize(x) for s in ("original", "row")
    )
    assert equal_operands(original.row, row.row)
    assert not equal_operands(original.col, row.col)


def test_nor_is_it_transposing_the_row_operand() -> None:
    x = normal(40, 70)
    original = lpq.quantizer("hybrid(row=fp8, col=fp8)").quantize(x, col=False)
    assert equal_operands(original.operand("col"), lpq.quantizer("fp8").quantize(x).col)
    for source in ("hybrid(row=fp8, col=fp8, col_source=row)", "hybrid(row=nvfp4, col=mxfp8, col_source=row)"):
        quantizer = lpq.quantizer(source)
        alone = quantizer.quantize(x, col=False)
        assert equal_operands(alone.operand("col"), quantizer.quantize(x).col)
    with pytest.raises(ValueError, match=r"row operand.*is absent and .*col_source=row.* cannot derive it"):
        quantizer.quantize(x, row=False).operand("row")


def test_the_column_alone_remembers_its_own_statistics() -> None:
    side = "fp8(scaling=delayed, history=4)"
    q = lpq.quantizer("hybrid", row=side, col=side, col_source="row")
    state = q.new_state()
    state["row_amax"].fill_(1.0)  # the row operand saturates at 1, and that is what the column operand sees
    x = torch.full((4, 8), 100.0)
    q.quantize(x, row=False, state=state)
    assert state["col_amax_history"][0] == 1.0
    assert not state["row_amax_history"].any()


# ------------------------------------------------------------------------------ hybrids of hybrids


def test_a_hybrid_of_hybrids_takes_its_sides_of_them() -> None:
    inner = "hybrid(row=mxfp8, col=nvfp4)", "hybrid(row=fp8, col=nvfp4(rht=true))"
    nested = lpq.quantizer("hybrid", row=inner[0], col=inner[1])
    assert (str(nested.side("row")), str(nested.side("col"))) == ("mxfp8", "nvfp4(rht=true)")
    flat = lpq.quantizer("hybrid(row=mxfp8, col=nvfp4(rht=true))").quantize(normal(32, 64))
    t = nested.quantize(normal(32, 64))
    assert equal_operands(t.row, flat.row)
    assert equal_operands(t.col, flat.col)
    assert lpq.quantizer(str(nested)) == nested


def test_a_hybrid_of_hybrids_goes_on_encoding_the_decoded_row_operand() -> None:
    inner = lpq.quantizer("hybrid(row=nvfp4, col=mxfp8, col_source=row)")
    assert twice(str(inner)).col_source == "row"
    assert lpq.quantizer("hybrid", row=inner, col="mxfp8").col_source == "original"


# ------------------------------------------------------------------------------ what it says of itself


def test_one_side_follows_from_the_other_only_where_both_are_one_transposable_format() -> None:
    derived = lpq.quantizer("hybrid(row=fp8, col=fp8)")
    assert derived.transposable
    t = derived.quantize(normal(16, 48))
    assert equal_operands(transpose(t.row), t.col)
    for text in (
        "hybrid(row=fp8, col=fp8(dtype=e5m2))",
        "hybrid(row=mxfp8, col=mxfp8)",
        "hybrid(row=fp8, col=fp8, col_source=row)",
    ):
        assert not lpq.quantizer(text).transposable, text


@pytest.mark.parametrize(
    ("text", "flipped"), [
        ("hybrid(row=mxfp8, col=nvfp4)", "hybrid(row=nvfp4, col=mxfp8)"),
        ("hybrid(row=mxfp8, col=mxfp8)", "hybrid(row=mxfp8, col=mxfp8)"),
        ("hybrid(row=nvfp4(rht=true), col=mxfp8)", "hybrid(row=mxfp8, col=nvfp4)"),
        ("hybrid(row=mxfp8, col=nvfp4(rht=true))", None), ("hybrid(row=mxfp8, col=nvfp4, col_source=row)", None),
    ]
)  # fmt: skip
def test_the_transposed_tensor(text: str, flipped: str | None) -> None:
    """There is none where a column operand is rotated, as row operands never are."""
    hybrid = lpq.quantizer(text)
    expected = lpq.quantizer(flipped) if flipped else None
    assert hybrid.flipped() == expected
    if expected is not None:
        x = normal(16, 48)
        assert equal_operands(hybrid.quantize(x).col, expected.quantize(x.t()).row)
        assert equal_operands(hybrid.quantize(x).row, expected.quantize(x.t()).col)


def test_sides_may_be_quantizers_or_their_texts() -> None:
    made = lpq.quantizer("hybrid", row=lpq.quantizer("mxfp8"), col="nvfp4(rht=true)", col_source="row")
    assert str(made) == "hybrid(row=mxfp8, col=nvfp4(rht=true), col_source=row)"


def test_it_has_no_operands_of_its_own() -> None:
    spec = registry.format("hybrid")
    assert spec.effective_bits is None
    assert registry.storage_class("hybrid") is Storage
    t = lpq.quantizer("hybrid(row=mxfp8, col=nvfp4)").quantize(normal(32, 32))
    assert [str(s.quantizer) for _, s in t.operands] == ["mxfp8", "nvfp4"]


BOTH = {"row": "mxfp8", "col": "mxfp8"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"row": "mxfp8"}, OptionError, "hybrid needs a quantizer for each side: add col=…"),
        ({}, OptionError, "hybrid needs a quantizer for each side: add row=…"),
        ({"row": "mxfp8", "col": 3}, OptionError, "a quantizer is wanted.*not 3"),
        ({"row": "mxfp8", "col": "mxfp9"}, UnknownFormat, "no format 'mxfp9' here: did you mean 'mxfp8'"),
        ({"row": "mxfp8", "col": "nvfp4(rth=true)"}, OptionError, "nvfp4 has no option 'rth'.*'rht'"),
        ({**BOTH, "col_source": "col"}, OptionError, "'col_source' must be 'original' or 'row', not 'col'"),
        ({**BOTH, "source": "row"}, OptionError, "hybrid has no option 'source'"),
    ],
)
def test_wrong_options_are_refused_in_words(options: dict, error: type[LpqError], message: str) -> None:
    with pytest.raises(error, match=message):
        lpq.quantizer("hybrid", **options)
