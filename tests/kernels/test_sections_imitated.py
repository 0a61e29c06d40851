"""Groups of rows and stacks that CUDA kernels encode in one launch have the bytes of the reference, or its values in
bf16. A CPU imitates the GPU (``imitated``).
"""

from __future__ import annotations

import imitated
import pytest
import torch
from support.comparing import equal_bytes, expect_bytes
from tile_sides import side_of
from torch import Tensor

import lpq
from lpq.core import Quantizer, Storage
from lpq.formats.sections import Sections, bounds, matrices, starts, unit
from lpq.kernels import sections
from lpq.operations import encoder, groups, sectioned
from lpq.operations.binding import Encoding, Operand
from lpq.operations.encoder import EncoderSpec
from lpq.operations.quantizing import quantize
from lpq.operations.states import recall
from lpq.testing.comparing import Poisoned

pytestmark = [*imitated.MARKS, pytest.mark.usefixtures("launched")]
COUNTS = [0, 5, 130, 0, 16, 257, 0]
SIZES = (3, 160, 96)
EDEN = "nvfp4(stochastic=eden)"
OF_GROUPS = (
    "fp8", "fp8(scaling=row)", "fp8(scaling=block)", "mxfp8", "mxfp4(scale=even, rht=true)",
    "nvfp4(rht=true, stochastic=true)", "fp8(static=true)", "nvfp4(rht=true, static=true)",
    "nvfp4(scaling=row, search=four_over_six, norm=256)", "nvfp4(rht=true, stochastic=unbiased)", EDEN,
)  # fmt: skip
OF_STACKS = ("fp8", "fp8(scaling=row)", "mxfp8", "fp8(scaling=block, block=128x128)", "nvfp4(block=16x16)")
OF_STACKS += ("nvfp4(block=16x16, static=true)", EDEN, "mxfp4(scale=ceil, rht=true, stochastic=true)")
EITHER = [(False, False), (True, True)]


def made(
    x: Tensor, offs: Tensor | None, row: Quantizer | None, col: Quantizer | None, seeds: Tensor,
    decoded: tuple[bool, bool], given: sectioned.Amaxes = (None, None),
) -> sectioned.SectionedOperands:  # fmt: skip
    *count, high, cols = x.shape
    number = len(offs) if offs is not None else count[0]
    rows = high if offs is not None else number * high
    known = given[0] is not None, given[1] is not None
    e = Encoding(
        row, col, (rows, cols), x.dtype, x.dtype, x.device, known, exact=decoded,
        sections=Sections(number, offs is None, at_once=True),
    )  # fmt: skip
    assert sectioned.why_not(e) is None
    run = sectioned.bind_sides(e, side_of(row, "row"), side_of(col, "col"))
    assert run is not None
    with Poisoned():
        return run(x, offs, seeds, given)


def static_state(quantizer: Quantizer, count: int) -> dict[str, Tensor]:
    """Other values for each section, from ones that clamp on."""
    return {name: (0.5 + i) * 4.0 ** torch.arange(count) for i, name in enumerate(quantizer.new_state())}


def decoded_by(operand: Storage) -> Tensor:
    return operand.decode_rotated().bfloat16()


def check_groups(
    row: str | None, col: str | None, decoded: tuple[bool, bool], counts: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    cols = 96 if EDEN not in (row, col) else 128 if True in decoded else 160
    x = torch.cat([*(3.0**i * torch.randn(n, cols) for i, n in enumerate(counts)), torch.full((7, cols), torch.nan)])
    x, offs, seeds = x.to(dtype), torch.tensor(counts).cumsum(0, dtype=torch.int32), torch.arange(len(counts)) - 3
    sides = [None if t is None else lpq.quantizer(t).side(d) for t, d in ((row, "row"), (col, "col"))]
    states = [static_state(side, len(counts)) if side is not None else {} for side in sides]
    pairs = (sides[0], None), (None, sides[1])
    known = [
        sectioned.given_of(side, *pair, state)[i] if side is not None and state else None
        for i, (side, pair, state) in enumerate(zip(sides, pairs, states, strict=True))
    ]
    assert (None in known) == (not any(states))
    found = made(x, offs, *sides, seeds, decoded, (known[0], known[1]))
    for dim, side in enumerate(sides):
        if side is None:
            continue
        alone = EncoderSpec(side, (len(x), cols), dtype, x.device, dim == 0, dim == 1)
        wanted = groups.encode_groups_reference(x, offs, alone, seeds, states[dim] or None)
        shape, at = (len(x), cols) if dim == 0 else (cols, len(x)), starts(offs.tolist(), unit(side, dim))
        for i, (start, stop) in enumerate(bounds(offs.tolist())):
            one = Operand(side, shape, dtype, dim=dim, tensors=wanted).group(i, start, stop, at[i])
            if not decoded[dim]:
                other = Operand(side, shape, dtype, dim=dim, tensors=found[dim]).group(i, start, stop, at[i])
                expect_bytes(other.tensors(), one.tensors(), f"{side}, {dim}, {i}")
                continue
            values = decoded_by(one)
            piece = found[dim][0][start:stop] if dim == 0 else found[dim][0][:, at[i] : at[i] + values.shape[1]]
            expect_bytes([piece], [values], f"{side}, {dim}, {i}")


@pytest.mark.parametrize("decoded", EITHER, ids=["encoded", "decoded"])
@pytest.mark.parametrize("text", OF_GROUPS)
def test_groups(text: str, decoded: tuple[bool, bool]) -> None:
    check_groups(text, text, decoded, COUNTS, torch.bfloat16)


def test_many_groups() -> None:
    """More than the lanes of a warp, of whose ends each takes one; and no rows at all."""
    check_groups("fp8(scaling=row)", "fp8(scaling=row)", (False, False), [n % 5 * 9 for n in range(70)], torch.bfloat16)
    check_groups("fp8(scaling=row)", "fp8(scaling=row)", (False, False), [0] * 40, torch.bfloat16)


@pytest.mark.parametrize(
    ("row", "col", "decoded"),
    [
        ("fp8(scaling=row)", None, (False, False)), (None, "fp8", (False, True)), ("fp8", "mxfp8", (True, False)),
        ("mxfp8", "nvfp4(rht=true, stochastic=true)", (True, True)),
    ],
)  # fmt: skip
def test_one_operand_and_two_formats(row: str | None, col: str | None, decoded: tuple[bool, bool]) -> None:
    check_groups(row, col, decoded, [33, 0, 150], torch.float32)


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "hybrid(row=fp8, col=identity, col_source=row)", "hybrid(row=identity, col=fp8, col_source=row)",
        "hybrid(row=mxfp8, col=nvfp4(rht=true, stochastic=true), col_source=row)",
        "hybrid(row=nvfp4(scaling=row), col=mxfp8, col_source=row)",
        "hybrid(row=nvfp4, col=nvfp4(stochastic=eden), col_source=row)",
        "hybrid(row=fp8(static=true), col=fp8(static=true, dtype=e5m2), col_source=row)",
    ],
)  # fmt: skip
def test_columns_of_groups_that_are_made_of_rows(text: str, decoded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels encode the rows, and what they decode to: the host waits for neither."""
    torch.manual_seed(0)
    quantizer, counts = lpq.quantizer(text), [33, 0, 150]
    x, offs = torch.randn(sum(counts), 96).bfloat16(), torch.tensor(counts).cumsum(0, dtype=torch.int32)
    seeds, state = torch.arange(len(counts)) - 1, static_state(quantizer, len(counts)) or None
    spec = EncoderSpec(quantizer, (len(x), 96), x.dtype, x.device, remembers=state is not None)
    reference = groups.encode_groups_reference(x, offs, spec, seeds, state)
    bound = all_at_once(spec, Sections(len(counts), False, at_once=True), decoded, monkeypatch)
    with Poisoned():
        out = bound.encode(x, state or (), seeds, offs)[:2]
    at = 0
    for dim, (operand, buffers) in enumerate(zip((bound.row, bound.col), out, strict=True)):
        assert operand is not None
        side, of_form = operand.quantizer, operand.form is not None
        end = at + len(side.layout)
        begins, alone = starts(offs.tolist(), unit(side, dim)), operand._replace(form=None, tensors=reference[at:end])
        for i, (start, stop) in enumerate(bounds(offs.tolist())):
            second = alone.group(i, start, stop, begins[i])
            if of_form:
                values = decoded_by(second)
                expect_bytes([buffers[0][:, begins[i] : begins[i] + values.shape[1]]], [values], f"{text}, {i}")
                continue
            first = alone._replace(tensors=buffers[:-1]).group(i, start, stop, begins[i])
            expect_bytes(first.tensors(), second.tensors(), f"{text}, {dim}, {i}")
        at = end


def all_at_once(
    spec: EncoderSpec, sections: Sections, decoded: bool, monkeypatch: pytest.MonkeyPatch
) -> encoder.Encoder:
    """The encoder of sections by kernels, which makes the column operand decoded, if that is wanted and encoded."""

    def waits(why: str) -> None:
        pytest.fail(why)

    monkeypatch.setattr(groups, "tell_of_waiting", waits)
    monkeypatch.setattr(sectioned, "side_of", lambda quantizer, direction, device: side_of(quantizer, direction))
    bound = groups.bind(spec._replace(sections=sections, exact=(False, decoded)))
    assert bound.col is not None
    assert (bound.col.form is not None) == (decoded and not bound.col.quantizer.plain)
    return bound


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "hybrid(row=mxfp8, col=mxfp8, col_source=row)", "hybrid(row=fp8, col=fp8(scaling=row), col_source=row)",
        "hybrid(row=nvfp4(search=four_over_six, norm=256), col=nvfp4(stochastic=eden), col_source=row)",
        "hybrid(row=nvfp4(block=16x16), col=mxfp8, col_source=row)",
    ],
)  # fmt: skip
def test_columns_of_stacks_that_are_made_of_rows(
    text: str, decoded: bool, monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    """All matrices in the launches of one; each has the bytes that it has by itself."""
    torch.manual_seed(1)
    x = (torch.randn(3, 128, 64) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]).bfloat16()
    seeds, spec = torch.arange(len(x)) - 3, EncoderSpec(lpq.quantizer(text), (128, 64), x.dtype, x.device)
    single = encoder.through_operators(spec)
    each = [single.encode(*one) for one in zip(x, [()] * len(x), seeds, strict=True)]
    several = all_at_once(spec, Sections(len(x), True, at_once=True), decoded, monkeypatch)
    launched.clear()
    with Poisoned():
        row, col, _ = several.encode(x, (), seeds)
    assert len(launched) <= 6, launched
    expect_bytes(row, [torch.stack(buffers) for buffers in zip(*(one[0] for one in each), strict=True)], text)
    assert several.col is not None
    wanted = [torch.stack(buffers) for buffers in zip(*(one[1] for one in each), strict=True)]
    if decoded:
        stack = several.col._replace(form=None).storage(wanted)
        wanted = [torch.stack([decoded_by(matrix) for matrix in matrices(stack)])]
    expect_bytes(col, wanted, text)


@pytest.mark.parametrize("decoded", EITHER, ids=["encoded", "decoded"])
@pytest.mark.parametrize("text", OF_STACKS)
def test_stacks(text: str, decoded: tuple[bool, bool]) -> None:
    torch.manual_seed(1)
    sizes = (3, 128, 256) if text == EDEN and True in decoded else SIZES
    x = (torch.randn(sizes) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]).bfloat16()
    seeds, quantizer = torch.arange(len(x)) - 3, lpq.quantizer(text)
    row, col = quantizer.side("row"), quantizer.side("col")
    state = static_state(quantizer, len(x)) or None
    found = made(x, None, row, col, seeds, decoded, sectioned.given_of(quantizer, row, col, state))
    of_row, of_col = ((recall(quantizer, *sides, state) if state else None) for sides in ((row, None), (None, col)))
    wanted = [quantize(x, of_row, row, None, seeds)[0], quantize(x, of_col, None, col, seeds)[1]]
    for tensors, operand, is_decoded in zip(found[:2], wanted, decoded, strict=True):
        assert operand is not None
        if is_decoded:
            expect_bytes(tensors, [torch.stack([decoded_by(m) for m in matrices(operand)])], text)
        else:
            expect_bytes(tensors, operand.tensors(), text)


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("text", ["fp8", "nvfp4(block=16x16)"])
def test_a_column_operand_that_is_made_later_takes_the_amaxes_of_the_row_operand(text: str, decoded: bool) -> None:
    torch.manual_seed(1)
    x = (torch.randn(SIZES) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]).bfloat16()
    seeds, quantizer = torch.arange(len(x)) - 3, lpq.quantizer(text)
    row, col = quantizer.side("row"), quantizer.side("col")
    assert sectioned.same_amaxes(row, col)
    amaxes, _ = made(x, None, row, None, seeds, (False, False))[2]
    assert amaxes is not None
    both = made(x, None, row, col, seeds, (False, decoded))
    later = made(x, None, None, col, seeds, (False, decoded), (None, amaxes))
    expect_bytes(later[1], both[1], text)
    wrong = made(x, None, None, col, seeds, (False, decoded), (None, amaxes / 3))
    assert not equal_bytes(wrong[1], both[1])


@pytest.mark.parametrize("text", ["fp8(scaling=row)", "fp8(scaling=block)", "mxfp8", "nvfp4(rht=true)"])
def test_other_operands_have_amaxes_of_their_own(text: str) -> None:
    quantizer = lpq.quantizer(text)
    assert not sectioned.same_amaxes(quantizer.side("row"), quantizer.side("col"))


def test_what_products_leave_is_cleared() -> None:
    """Rows of no group are cleared, and no byte more."""
    out, offs = torch.full((40, 24), 7.0, dtype=torch.bfloat16), torch.tensor([0, 16, 33], dtype=torch.int32)
    sections.bind_clear_rows(out.device)(out, offs)
    assert (out[:33] == 7).all()
    assert not out[33:].any()
    stack, ends = torch.full((4, 5, 3), 7.0, dtype=torch.bfloat16), torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    sections.bind_clear_matrices(stack.device)(stack, ends)
    assert not stack[0].any()
    assert not stack[2].any()
    assert (stack[[1, 3]] == 7).all()
