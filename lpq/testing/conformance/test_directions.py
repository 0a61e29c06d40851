"""The two operands of a tensor: the column operand is the row operand of the transpose."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from lpq.formats import Quantizer, Storage
from lpq.operations import transpose
from lpq.testing.expect import equal, one_nan, same, same_operand
from lpq.testing.operands import SEED, encode, few, normal
from lpq.testing.options import only
from lpq.testing.table import cases, in_views


@few
@given(rows=st.integers(0, 48), cols=st.integers(1, 140))
@example(rows=0, cols=32)
@example(rows=5, cols=40)
def test_operands_are_those_of_the_matrix_and_its_transpose(quantizer: Quantizer, rows: int, cols: int) -> None:
    """The row operand encodes ``x`` and the column operand ``xᵀ``, each by its side of the quantizer."""
    x = normal(rows, cols, torch.bfloat16)
    tensor = quantizer.quantize(x, seed=SEED)
    row, col = quantizer.side("row"), quantizer.side("col")
    expected_row, expected_col = encode(row, x), column_operand(quantizer, x)
    same_operand(tensor.operand("row"), expected_row, f"{row}: the row operand of {[rows, cols]}")
    same_operand(tensor.operand("col"), expected_col, f"{col}: the column operand of {[rows, cols]}")


def column_operand(quantizer: Quantizer, x: torch.Tensor) -> Storage:
    """The column operand of ``x``, encoded on its own."""
    col = quantizer.side("col")
    if quantizer.col_source == "row":
        decoded = encode(quantizer.side("row"), x).decode().float()
        return encode(col, decoded.t(), direction="col").astype(x.dtype)
    return encode(col, x.t(), direction="col")


def test_one_direction_is_that_of_both(quantizer: Quantizer) -> None:
    """Asking for one operand gives the bytes that asking for both gives."""
    x = normal(40, 96)
    both = quantizer.quantize(x, seed=SEED)
    row = quantizer.quantize(x, col=False, seed=SEED)
    col = quantizer.quantize(x, row=False, seed=SEED)
    left_out = row.col, col.row
    equal(left_out, (None, None), f"{quantizer}: what col=False and row=False leave out (leave quantize as it is)")
    same_operand(row.operand("row"), both.operand("row"), f"{quantizer}: the row operand alone")
    same_operand(col.operand("col"), both.operand("col"), f"{quantizer}: the column operand alone")


@few
@given(rows=st.integers(1, 140), cols=st.integers(1, 140))
@example(rows=1, cols=1)
@example(rows=33, cols=17)
@only(lambda side: side.transposable, "is transposable")
def test_transposed_is_the_operand_of_the_transpose(side: Quantizer, rows: int, cols: int) -> None:
    """``transposed`` needs only the buffers and gives the very bytes of encoding the transposed matrix, with a NaN and
    an infinity in it too."""
    odd = normal(rows, cols)
    odd[rows // 2, cols // 2], odd[-1, -1] = torch.nan, torch.inf
    for x, holds in ((normal(rows, cols), ""), (odd, " with a NaN and an infinity")):
        check_transposed(side, x, f"{[rows, cols]}{holds}")


@only(lambda side: side.transposable, "is transposable")
def test_transposed_is_right_for_every_matrix(side: Quantizer) -> None:
    """The same for the table of matrices: dtypes, magnitudes, outliers anywhere, ragged, square and large ones."""
    for case in cases(side):
        check_transposed(side, case.matrix(), str(case))


def check_transposed(side: Quantizer, x: Tensor, which: str) -> None:
    """The transposed operand of a matrix is the operand of its transpose."""
    rows, cols = x.shape
    operand, expected = encode(side, x), encode(side, x.t())
    wrapped = side.storage.from_tensors(operand.tensors(), side, (rows, cols), x.dtype)
    what = f"{side.storage.__name__}.transposed of {which}, beside encoding the transposed matrix"
    for view, how in ((wrapped, ""), (in_views(wrapped), ", of buffers that are transposed views")):
        same_operand(view.transposed().bind(side, (cols, rows), x.dtype), expected, what + how)
    same_operand(transpose(transpose(wrapped)), operand, f"{what}, twice")
    same(one_nan(expected.decode().t()), one_nan(operand.decode()), f"{what}, decoded")


def test_leading_dimensions_are_rows(quantizer: Quantizer) -> None:
    """A tensor of more dimensions is the matrix of all its leading ones; a vector is one row, a scalar one element."""
    x = normal(24, 64)
    for tensor, matrix in (
        (x.view(2, 12, 64), x),
        (x.view(2, 3, 4, 64).permute(2, 0, 1, 3), x.view(6, 4, 64).transpose(0, 1).reshape(24, 64)),
        (x[0], x[:1]),
        (x[0, 0], x[:1, :1]),
    ):
        result, reference = (quantizer.quantize(y, seed=SEED) for y in (tensor, matrix))
        what = f"{quantizer}: a tensor {list(tensor.shape)}"
        assert result.shape == tensor.shape, (
            f"{what} became one {list(result.shape)}; it must keep its shape: leave quantize as Quantizer has it"
        )
        for direction, operand in reference.operands:
            same_operand(result.operand(direction), operand, f"{what}, its {direction} operand")
        same(result.dequantize().view(matrix.shape), reference.dequantize(), f"{what}, decoded")
