"""Groups of rows and stacks of matrices: each is encoded as if there were no other."""

from __future__ import annotations

import torch

from lpq.formats import Quantizer
from lpq.formats.groups import bounds, starts, unit
from lpq.formats.stacks import matrices
from lpq.operations.groups import encode_groups
from lpq.operations.operands import encode_operands
from lpq.testing.expect import same_operand, there
from lpq.testing.operands import SEED, normal
from lpq.testing.options import Family, only
from lpq.testing.table import LARGE

COUNTS = (5, 0, 250)
STATELESS = only(lambda q: not q.new_state(), "remembers nothing across steps")


@STATELESS
def test_a_group_is_encoded_by_itself(quantizer: Quantizer) -> None:
    """Rows in groups, of which the second is empty and the last is a thousand times as large, hold the bytes of each
    group alone, with the seed of its own; and so a grouped layer computes what separate layers do."""
    rows = sum(COUNTS)
    x = normal(rows + 2, 40)
    x[COUNTS[0] : rows] *= 1000
    ends = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    seeds = torch.arange(SEED, SEED + len(COUNTS))
    row, col = encode_groups(quantizer, x, ends, row=True, col=True, seeds=seeds)
    for grouped, direction in ((there(row, "the row operand"), "row"), (there(col, "the column operand"), "col")):
        begins = starts(ends.tolist(), unit(grouped.quantizer, grouped.dim))
        for group, (start, stop) in enumerate(bounds(ends.tolist())):
            alone = encode_operands(quantizer, x[start:stop], seed=seeds[group])
            expected = there(alone.row if direction == "row" else alone.col, "an operand")
            what = f"{quantizer}: the {direction} operand of group {group} of {list(COUNTS)} rows"
            same_operand(grouped.matrix(group, start, stop, begins[group]), expected, what)


@STATELESS
def test_a_matrix_of_a_stack_is_encoded_by_itself(quantizer: Quantizer) -> None:
    """A stack of two matrices, one a thousand times as large, holds the bytes of each alone."""
    _check_stack(quantizer, 24, 40)


@STATELESS
def test_a_large_matrix_of_a_stack_is_encoded_by_itself(family: Family) -> None:
    """So does a stack of large matrices, with the default options."""
    _check_stack(family.default, *LARGE)


def _check_stack(quantizer: Quantizer, rows: int, cols: int) -> None:
    x = torch.stack([normal(rows, cols), 1000 * normal(rows, cols, seed=1)])
    seeds = torch.tensor([SEED, SEED + 1])
    stack = encode_operands(quantizer, x, seed=seeds)
    for direction, operand in (("row", stack.row), ("col", stack.col)):
        for i, matrix in enumerate(matrices(there(operand, f"the {direction} operand"))):
            alone = encode_operands(quantizer, x[i], seed=seeds[i])
            expected = there(alone.row if direction == "row" else alone.col, "an operand")
            same_operand(matrix, expected, f"{quantizer}: the {direction} operand of matrix {i} of a stack of two")
