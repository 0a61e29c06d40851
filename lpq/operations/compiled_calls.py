"""Functions that compiled code calls in place of operators: the same bodies, bound to shapes, without the dispatcher.

An operator costs the host several times as much as its bound kernel: the dispatcher, lists of tensors, finding the
kernel. A compiled layer calls eight. Each function here takes the arguments of the operator of its name, and returns
the same bytes. It calls that operator under autocast, which would round the operands of a reference, and where no
kernel is bound. The device is the current one, as Inductor makes it for the code that it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lpq.formats.layout import check_there
from lpq.kernels.table import bound_once
from lpq.operations.binding import Encoding, Multiply, Operand, Product
from lpq.operations.bound import Run, bind_product, bind_run
from lpq.operations.exact_form import form_of
from lpq.operations.random_seeds import drawn
from lpq.operations.sides import quantizer_of
from lpq.torch_private.compiling import call_in_place_of, once_when_traced
from lpq.torch_private.dispatch import autocasts

OperandKey = tuple[str, int, tuple[int, ...], torch.dtype]
"""An operand as an operator is given it: its ``Storage.text``, how many tensors, its shape and its dtype."""
NEITHER = False, False
"""No operand is made in its exact form."""


def quantize(
    x: Tensor, stats: Sequence[Tensor | None], row: str, col: str, seed: Tensor | None, offset: int, measure: bool,
    layouts: str, across: int = 0,
) -> list[Tensor]:  # fmt: skip
    """Encode as ``lpq::quantize`` does."""
    if across or x.dim() != 2 or autocasts():
        made: list[Tensor] = torch.ops.lpq.quantize.default(x, stats, row, col, seed, offset, measure, layouts, across)
        return made
    given = tuple([s is not None for s in stats]) if stats else ()
    run = _encoding(row, col, x.shape, x.dtype, x.device, given, offset, measure, NEITHER)
    of_row, of_col, measured = run(x, stats, seed)
    return [*of_row, *of_col, *measured]


def multiplicands(
    x: Tensor, row: str, col: str, seed: Tensor | None, exact_row: bool, exact_col: bool, layouts: str
) -> list[Tensor]:
    """Make multiplicands as ``lpq::multiplicands`` does."""
    exact = exact_row, exact_col
    run = _encoding(row, col, x.shape, x.dtype, x.device, (), 0, False, exact)
    of_row, of_col, _ = run(x, (), seed)
    return [*of_row, *of_col]


def gemm(
    a: list[Tensor], b: list[Tensor], bias: Tensor | None, qa: str, qb: str, shape_a: list[int], shape_b: list[int],
    dtype_a: torch.dtype, dtype_b: torch.dtype, dtype: torch.dtype, fast_accumulate: bool,
) -> Tensor:  # fmt: skip
    """Multiply as ``lpq::gemm`` does."""
    if autocasts():
        product: Tensor = torch.ops.lpq.gemm.default(
            a, b, bias, qa, qb, shape_a, shape_b, dtype_a, dtype_b, dtype, fast_accumulate
        )
        return product
    check_there(a[0])
    check_there(b[0])
    left, right = (qa, len(a), tuple(shape_a), dtype_a), (qb, len(b), tuple(shape_b), dtype_b)
    return _product(left, right, dtype, a[0].device, fast_accumulate)(a, b, bias)


@once_when_traced
def spare_the_dispatcher() -> None:
    """Have compiled code call these functions in place of the operators."""
    _spare()


@cache
def _spare() -> None:
    call_in_place_of("lpq::quantize", quantize)
    call_in_place_of("lpq::multiplicands", multiplicands)
    call_in_place_of("lpq::gemm", gemm)
    call_in_place_of("lpq::draw_seeds", drawn)


@bound_once
def _encoding(
    row: str, col: str, shape: torch.Size, dtype: torch.dtype, device: torch.device, given: tuple[bool, ...],
    offset: int, measure: bool, exact: tuple[bool, bool],
) -> Run:  # fmt: skip
    """Bind an encoding to this shape and these options."""
    e = Encoding(quantizer_of(row), quantizer_of(col), (shape[0], shape[1]), dtype, dtype, device, given)
    return bind_run(e._replace(measure=measure, offset=offset, exact=exact, apart=True))


@bound_once
def _product(a: OperandKey, b: OperandKey, dtype: torch.dtype, device: torch.device, fast: bool) -> Multiply:
    """Bind a product of these operands."""
    return bind_product(Product(_operand(*a), _operand(*b), dtype, device, fast))


def _operand(text: str, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Operand:
    form, name = form_of(text, count)
    return Operand(quantizer_of(name), (shape[0], shape[1]), dtype, form)
