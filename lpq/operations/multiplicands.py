"""Both operands of a matrix, at least one in its exact form: it is multiplied at once, and never encoded."""

from __future__ import annotations

import torch
from torch import Tensor

from lpq import registry
from lpq.formats.format import Quantizer, Storage
from lpq.operations.binding import Operand, on_device
from lpq.operations.bound import encoding
from lpq.operations.fused_pair import exact_forms, pair_of
from lpq.operations.operators import can_call_directly, define, layout_hash
from lpq.operations.sides import draws
from lpq.torch_private.dispatch import modes


def multiplicands(
    x: Tensor, row: Quantizer, col: Quantizer, seed: Tensor | None, exact: tuple[bool, bool]
) -> tuple[Storage, Storage] | None:
    """Make both operands of ``x``, at least one in its ``exact`` form, without encoding it first; None if that is not
    possible."""
    rows, cols = x.shape
    if seed is None and draws(row, col):
        return None
    forms = exact_forms(row, col, (rows, cols), exact, x.device)
    if forms is None:
        return None
    texts = row.text, col.text
    if can_call_directly(x):
        with on_device(x.device):
            both = multiplicand_tensors(x, *texts, seed, *exact)
    else:
        both = torch.ops.lpq.multiplicands(x, *texts, seed, *exact, layout_hash(*texts))
    at = len(row.layout) if forms[0] is None else 1 + forms[0].factor
    return (
        Operand(row, (rows, cols), x.dtype, forms[0]).storage(both[:at]),
        Operand(col, (cols, rows), x.dtype, forms[1]).storage(both[at:]),
    )


def multiplicand_tensors(
    x: Tensor, row: str, col: str, seed: Tensor | None, exact_row: bool, exact_col: bool, layouts: str = ""
) -> list[Tensor]:
    """The operator's body: the buffers of both. Compiled code calls it in place of the operator."""
    exact = exact_row, exact_col
    run = encoding(row, col, x.shape, x.dtype, x.dtype, x.device, (), 0, False, exact, modes() > 0)
    of_row, of_col, _ = run(x, (), seed)
    return [*of_row, *of_col]


def _multiplicands_fake(
    x: Tensor, row: str, col: str, seed: Tensor | None, exact_row: bool, exact_col: bool, layouts: str = ""
) -> list[Tensor]:
    rows, cols = x.shape
    pair = pair_of(row, col, (exact_row, exact_col), x.device)
    assert pair is not None
    out: list[Tensor] = []
    for side, text, shape in zip(pair, (row, col), ((rows, cols), (cols, rows)), strict=True):
        if side.exact is None:
            quantizer: Quantizer = registry.quantizer(text)
            out += quantizer.storage.fresh(quantizer, shape, x).tensors()
        else:
            out += [x.new_empty(shape, dtype=torch.bfloat16)]
            out += [x.new_empty((), dtype=torch.float32)] if side.exact.factor else []
    return out


define(
    "multiplicands(Tensor x, str row, str col, Tensor? seed, bool exact_row, bool exact_col, "
    'str layouts="") -> Tensor[]',
    multiplicand_tensors,
    _multiplicands_fake,
    on_device,
)
