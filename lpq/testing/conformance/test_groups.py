"""Sections: each group of rows, and each matrix of a stack, is encoded as if there were no other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lpq.formats import Quantizer
from lpq.formats.format import DIRECTIONS
from lpq.formats.sections import bounds, matrices, starts, unit, with_values_of_rows
from lpq.operations.groups import encode_groups
from lpq.operations.operands import encode_operands
from lpq.testing.expect import same, same_operand, there
from lpq.testing.operands import SEED, encode, normal
from lpq.testing.options import Family, only
from lpq.testing.table import LARGE

COUNTS = (5, 0, 250)
STATELESS = only(lambda q: not q.new_state(), "remembers nothing across steps")


def with_states(quantizer: Quantizer, sections: int) -> Iterator[tuple[Quantizer, Mapping[str, Tensor] | None]]:
    """Yield the quantizer, and the same with static statistics if it can have them: one of each section."""
    yield quantizer, None
    static = quantizer.frozen()
    state = {
        name: torch.stack([torch.full_like(value, 3.0 + section) for section in range(sections)])
        for name, value in static.new_state().items()
    }
    if state:
        yield static, state


def own(state: Mapping[str, Tensor] | None, section: int) -> Mapping[str, Tensor] | None:
    """The static statistics of one section."""
    return None if state is None else {name: values[section] for name, values in state.items()}


@STATELESS
def test_a_group_is_encoded_by_itself(quantizer: Quantizer) -> None:
    """Rows in groups, of which the second is empty and the last is a thousand times as large, hold the bytes of each
    group alone, with the seed of its own; and so a grouped layer computes what separate layers do."""
    rows = sum(COUNTS)
    x = normal(rows + 2, 40)
    x[COUNTS[0] : rows] *= 1000
    ends = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    seeds = torch.arange(SEED, SEED + len(COUNTS))
    for format, state in with_states(quantizer, len(COUNTS)):
        operands = encode_groups(format, x, ends, row=True, col=True, seeds=seeds, state=state)
        for direction, operand in zip(DIRECTIONS, operands, strict=True):
            grouped = there(operand, f"the {direction} operand")
            begins = starts(ends.tolist(), unit(grouped.quantizer, grouped.dim))
            for group, (start, stop) in enumerate(bounds(ends.tolist())):
                alone = encode_operands(format, x[start:stop], seed=seeds[group], state=own(state, group))
                expected = there(getattr(alone, direction), "an operand")
                what = f"{format}: the {direction} operand of group {group} of {list(COUNTS)} rows"
                same_operand(grouped.group(group, start, stop, begins[group]), expected, what)


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
    for format, state in with_states(quantizer, len(x)):
        operands = encode_operands(format, x, seed=seeds, state=state)
        for direction, operand in zip(DIRECTIONS, operands[:2], strict=True):
            for i, matrix in enumerate(matrices(there(operand, f"the {direction} operand"))):
                alone = encode_operands(format, x[i], seed=seeds[i], state=own(state, i))
                expected = there(getattr(alone, direction), "an operand")
                same_operand(matrix, expected, f"{format}: the {direction} operand of matrix {i} of a stack of two")


@only(lambda side: side.by_rows is not None, "has `by_rows`")
def test_values_of_rows_decode_alike(side: Quantizer) -> None:
    """The rows of several matrices, each row with the values of its matrix, decode by `by_rows` to the bits to which
    the matrices decode, with a NaN and an infinity in one of them, too."""
    parts = [normal(5, 40), 1000 * normal(33, 40, seed=1), normal(2, 40, seed=2)]
    parts[2][0, 0], parts[2][1, 5] = torch.nan, torch.inf
    operands = [encode(side, x) for x in parts]
    buffers = [
        torch.stack(several) if declared.block[0] is None else torch.cat(several)
        for declared, *several in zip(side.layout, *(operand.tensors() for operand in operands), strict=True)
    ]
    owners = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(x) for x in parts]))
    joined = with_values_of_rows(side, buffers, owners, (len(owners), 40), parts[0].dtype)
    values = there(joined, f"the operand of {side.by_rows}, as {side}.by_rows declares it for rows").decode()
    expected = torch.cat([operand.decode() for operand in operands])
    same(values, expected, f"{side}: rows of three matrices by {side.by_rows}, beside each matrix by itself")
