"""Hybrid: two quantizers in one, which is exactly each of them on its side."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from nasty import VALUES, normal, same, values, views
from support.comparing import equal
from torch import Tensor

import lpq
from lpq import registry
from lpq.core import Buffer, Quantizer, Stat, Storage, decode, transpose
from lpq.registry import FormatSpec, hookimpl
from lpq.registry.errors import LpqError, OptionError, UnknownFormat

QUANTIZERS = [
    "fp8",
    "fp8(dtype=e5m2, pow2=true)",
    "fp8(scaling=delayed, history=2)",
    "fp8(scaling=delayed, history=3, margin=1, algo=most_recent)",
    "fp8(scaling=row)",
    "fp8(scaling=block)",
    "fp8(scaling=block, pow2=false, block=128x128)",
    "mxfp8",
    "mxfp8(dtype=e5m2)",
    "nvfp4",
    "nvfp4(block=16x16)",
    "nvfp4(rht=true)",
    "nvfp4(stochastic=true)",
    "nvfp4(block=16x16, rht=true, stochastic=true)",
    "identity",
    "identity(dtype=bfloat16)",
    "hybrid(row=mxfp8, col=nvfp4(rht=true))",
    "hybrid(row=nvfp4, col=mxfp8, col_source=row)",
    "hybrid(row=fp8(scaling=delayed, history=2), col=nvfp4(stochastic=true))",
]
every = pytest.mark.parametrize("text", QUANTIZERS)


def twice(text: str) -> Quantizer:
    """The same quantizer on both sides."""
    return lpq.quantizer("hybrid", row=text, col=text)


# ------------------------------------------------------------------------------ hybrid(row=A, col=A) is A


@every
def test_the_same_twice_is_the_same(text: str) -> None:
    a, hybrid = lpq.quantizer(text), twice(text)
    assert (hybrid.side("row"), hybrid.side("col")) == (a.side("row"), a.side("col"))
    for x in (*values(torch.float32).values(), *views(torch.bfloat16).values()):
        for row, col in ((True, True), (True, False), (False, True)):
            t, u = (q.quantize(x, row=row, col=col, seed=5) for q in (a, hybrid))
            assert [d for d, _ in t.operands] == [d for d, _ in u.operands]
            for (_, one), (_, other) in zip(t.operands, u.operands, strict=True):
                assert one.quantizer == other.quantizer
                assert same(one, other)


def test_the_comparison_could_fail() -> None:
    x = normal(32, 64)
    for one, other in (
        ("mxfp8", "mxfp8(dtype=e5m2)"),
        ("nvfp4", "nvfp4(rht=true)"),
        ("fp8", "mxfp8"),
    ):
        assert not same(twice(one).quantize(x).col, twice(other).quantize(x).col)
    a = lpq.quantizer("nvfp4(stochastic=true)")
    assert not same(a.quantize(x, seed=5).row, twice("nvfp4(stochastic=true)").quantize(x, seed=6).row)


@every
def test_the_same_twice_remembers_the_same(text: str) -> None:
    a, hybrid = lpq.quantizer(text), twice(text)
    states = a.new_state(), hybrid.new_state()
    assert list(states[0]) == list(states[1])
    for step in range(5):
        x = normal(16, 48, seed=step) * 4.0**step
        t, u = (q.quantize(x, state=s or None, seed=step) for q, s in zip((a, hybrid), states, strict=True))
        assert same(t.row, u.row)
        assert same(t.col, u.col)
        assert equal(*(s.values() for s in states))


def weight_of(text: str) -> str:
    """A weight whose operands go with those of ``text``: dgrad's cannot be rotated, since dy's are not."""
    return "nvfp4" if lpq.quantizer(text).side("col").rotation else text


def trained(recipe: object, steps: int = 3) -> list[Tensor]:
    """Outputs and gradients of a small layer over some steps of training, and its state in the end."""
    torch.manual_seed(0)
    layer = lpq.nn.Linear(48, 32, recipe=recipe)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    out: list[Tensor] = []
    for step in range(steps):
        x = normal(24, 48, seed=step).requires_grad_()
        y = layer(x)
        y.square().mean().backward()
        out += [y.detach(), x.grad, layer.weight.grad.clone()]
        optimizer.step()
        optimizer.zero_grad()
    return out + list(layer.buffers())


@every
def test_the_same_twice_trains_the_same(text: str) -> None:
    w = weight_of(text)
    plain = trained({"x": lpq.quantizer(text), "w": lpq.quantizer(w), "dy": lpq.quantizer(text)})
    hybrid = trained({"x": twice(text), "w": twice(w), "dy": twice(text)})
    assert len(plain) == len(hybrid)
    assert equal(plain, hybrid)


# ------------------------------------------------------------------------------ two different sides

SIDES = [
    "fp8",
    "fp8(scaling=delayed, history=2)",
    "fp8(scaling=block)",
    "mxfp8",
    "nvfp4",
    "nvfp4(stochastic=true)",
    "identity",
]
OTHERS = [*zip(SIDES, [*SIDES[1:], *SIDES[:1]], strict=True)]
"""Each of them once on each side. The conformance kit asks, and trains, every format beside every other one."""


@pytest.mark.parametrize(("row", "col"), OTHERS)
def test_each_side_is_its_own_format(row: str, col: str) -> None:
    hybrid = lpq.quantizer("hybrid", row=row, col=col)
    for value in VALUES:
        x = values(torch.bfloat16)[value]
        t = hybrid.quantize(x, seed=1)
        assert same(t.row, lpq.quantizer(row).quantize(x, seed=1).row)
        assert same(t.col, lpq.quantizer(col).quantize(x, seed=1).col)


def test_each_side_keeps_its_own_state() -> None:
    hybrid = lpq.quantizer("hybrid(row=fp8(scaling=delayed, history=2), col=fp8(scaling=delayed, history=3))")
    state = hybrid.new_state()
    shapes = {name: tuple(t.shape) for name, t in state.items()}
    assert shapes == {"row_amax_history": (2,), "row_amax": (), "col_amax_history": (3,), "col_amax": ()}
    hybrid.quantize(torch.full((4, 4), 5.0), state=state, col=False)
    assert (state["row_amax"], state["col_amax"]) == (5, 0)
    hybrid.quantize(torch.full((4, 4), 7.0), state=state)
    assert (state["row_amax"], state["col_amax"]) == (7, 7)


@pytest.mark.parametrize(("row", "col"), OTHERS)
def test_the_column_operand_may_encode_the_decoded_row_operand(row: str, col: str) -> None:
    hybrid = lpq.quantizer("hybrid", row=row, col=col, col_source="row")
    x = normal(40, 70)
    for wanted in (True, False):
        t = hybrid.quantize(x, row=wanted, seed=1)
        first = lpq.quantizer(row).quantize(x, seed=1).row
        assert same(t.col, lpq.quantizer(col).quantize(decode(first, torch.float32), seed=1).col)
        assert (t.row is not None) == wanted
        assert not wanted or same(t.row, first)


def test_encoding_the_decoded_row_operand_is_not_encoding_the_original() -> None:
    x = normal(40, 70)
    original, row = (
        lpq.quantizer("hybrid(row=nvfp4, col=mxfp8)", col_source=s).quantize(x) for s in ("original", "row")
    )
    assert same(original.row, row.row)
    assert not same(original.col, row.col)


def test_nor_is_it_transposing_the_row_operand() -> None:
    x = normal(40, 70)
    original = lpq.quantizer("hybrid(row=fp8, col=fp8)").quantize(x, col=False)
    assert same(original.operand("col"), lpq.quantizer("fp8").quantize(x).col)
    for source in ("hybrid(row=fp8, col=fp8, col_source=row)", "hybrid(row=nvfp4, col=mxfp8, col_source=row)"):
        quantizer = lpq.quantizer(source)
        alone = quantizer.quantize(x, col=False)
        assert same(alone.operand("col"), quantizer.quantize(x).col)
    with pytest.raises(ValueError, match=r"row operand.*is absent and .*col_source=row.* cannot derive it"):
        quantizer.quantize(x, row=False).operand("row")


# ------------------------------------------------------------------------------ hybrids of hybrids


def test_a_hybrid_of_hybrids_takes_its_sides_of_them() -> None:
    inner = "hybrid(row=mxfp8, col=nvfp4)", "hybrid(row=fp8, col=nvfp4(rht=true))"
    nested = lpq.quantizer("hybrid", row=inner[0], col=inner[1])
    assert (str(nested.side("row")), str(nested.side("col"))) == ("mxfp8", "nvfp4(rht=true)")
    flat = lpq.quantizer("hybrid(row=mxfp8, col=nvfp4(rht=true))").quantize(normal(32, 64))
    t = nested.quantize(normal(32, 64))
    assert same(t.row, flat.row)
    assert same(t.col, flat.col)
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
    assert same(transpose(t.row), t.col)
    for text in (
        "hybrid(row=fp8, col=fp8(dtype=e5m2))",
        "hybrid(row=mxfp8, col=mxfp8)",
        "hybrid(row=fp8, col=fp8, col_source=row)",
    ):
        assert not lpq.quantizer(text).transposable, text


@pytest.mark.parametrize(
    ("text", "flipped"),
    [
        ("hybrid(row=mxfp8, col=nvfp4)", "hybrid(row=nvfp4, col=mxfp8)"),
        ("hybrid(row=mxfp8, col=mxfp8)", "hybrid(row=mxfp8, col=mxfp8)"),
        ("hybrid(row=nvfp4(rht=true), col=mxfp8)", "hybrid(row=mxfp8, col=nvfp4)"),
        ("hybrid(row=mxfp8, col=nvfp4(rht=true))", None),  # whose row operands are never rotated
        ("hybrid(row=mxfp8, col=nvfp4, col_source=row)", None),
    ],
)
def test_the_transposed_tensor(text: str, flipped: str | None) -> None:
    hybrid = lpq.quantizer(text)
    expected = lpq.quantizer(flipped) if flipped else None
    assert hybrid.flipped() == expected
    if expected is not None:
        x = normal(16, 48)
        assert same(hybrid.quantize(x).col, expected.quantize(x.t()).row)
        assert same(hybrid.quantize(x).row, expected.quantize(x.t()).col)


@every
def test_it_is_a_constant_that_its_text_makes_again(text: str) -> None:
    hybrid = twice(text)
    for other in (lpq.quantizer(str(hybrid)), pickle.loads(pickle.dumps(hybrid)), copy.deepcopy(hybrid)):
        assert other == hybrid
        assert hash(other) == hash(hybrid)
    assert lpq.quantizer(f"hybrid(row={text}, col={text})") == hybrid


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


# ------------------------------------------------------------------------------ third parties


class HalvesStorage(Storage):
    layout = (Buffer("data", torch.float16), Buffer("amax", torch.float32, block=(1, None)))

    def decode(self) -> Tensor:
        return self.data.float() * self.amax


@dataclass(frozen=True)
class HalvesQuantizer(Quantizer):
    """A format that no plugin has: fp16, relative to each row's amax."""

    stats = (Stat("amax", block=(1, None)),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": x.abs().amax(dim=1, keepdim=True).float()}

    def encode(self, x: Tensor, stats: dict[str, Tensor]) -> HalvesStorage:
        return HalvesStorage(data=(x / stats["amax"].clamp(min=1e-30)).half(), amax=stats["amax"])


@hookimpl
def lpq_register_formats() -> FormatSpec:
    return FormatSpec(
        name="halves",
        summary="for this test",
        quantizer=f"{__name__}:HalvesQuantizer",
        storage=f"{__name__}:HalvesStorage",
        effective_bits=16,
    )


@pytest.fixture
def halves():
    registry.register(SimpleNamespace(lpq_register_formats=lpq_register_formats), name="halves")
    yield "halves"
    registry.refresh()


@pytest.mark.parametrize("other", SIDES)
def test_third_party_formats_on_either_side(halves: str, other: str) -> None:
    x = normal(24, 48)
    for row, col in ((halves, other), (other, halves), (halves, halves)):
        hybrid = lpq.quantizer("hybrid", row=row, col=col)
        t = hybrid.quantize(x, seed=1)
        assert same(t.row, lpq.quantizer(row).quantize(x, seed=1).row)
        assert same(t.col, lpq.quantizer(col).quantize(x, seed=1).col)
        assert all(tensor.isfinite().all() for tensor in trained(hybrid))


def test_the_column_alone_remembers_its_own_statistics() -> None:
    side = "fp8(scaling=delayed, history=4)"
    q = lpq.quantizer("hybrid", row=side, col=side, col_source="row")
    state = q.new_state()
    state["row_amax"].fill_(1.0)  # the row operand saturates at 1, and that is what the column operand sees
    x = torch.full((4, 8), 100.0)
    q.quantize(x, row=False, state=state)
    assert state["col_amax_history"][0] == 1.0
    assert not state["row_amax_history"].any()
