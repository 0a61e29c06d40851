"""Products of any two formats through bf16, for hardware that multiplies no encoded operands.

By a ``KernelSpec`` for the operation ``exact``, a format declares how an operand becomes, without loss, a bf16 matrix
and a factor in fp32. One bf16 product, whose sums get the factors of both, then multiplies operands of any two such
formats, and no pair of formats has code of its own. The operation has no reference: a format need not declare it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from lpq import registry
from lpq.formats.format import Quantizer, Storage
from lpq.kernels import KernelError, choose, cublaslt
from lpq.kernels.products import bind_product_with_alpha, product, scaled_product
from lpq.kernels.table import optional
from lpq.operations.binding import Multiply, Operand, Product, cached_product
from lpq.operations.decoding import decode
from lpq.operations.exact_form import BoundExact, Exact, Multiplicand, ToExact
from lpq.operations.references import gemm_reference
from lpq.operations.rotated_decoding import decode_rotated

S = TypeVar("S", bound=Storage)


def exact(operand: Storage) -> Exact | None:
    """The operand as a bf16 matrix and a factor, or None if its format has no such form for an operand of its shape."""
    if isinstance(operand, Multiplicand):
        return operand.form
    impl = choose("exact", (operand.quantizer.text,), operand.device).impl
    return impl(operand) if impl is not None else None


def decoded(operand: Storage) -> Exact | None:
    """Return the exact form of ``operand``: the ``impl`` of a format whose decoded values bf16 holds, as an element and
    its scale have 8 bits together at most. A rotation is left where it is."""
    return in_its_basis(operand, lambda whole: Exact(decode_rotated(whole, torch.bfloat16)))


def in_its_basis(operand: S, exact: Callable[[S], Exact]) -> Exact | None:
    """The ``exact`` form of an operand whose columns fill its rotation's blocks. Where a rotation has mixed columns of
    padding into the last block, the columns of that block are the rest, decoded: what padding became counts in no
    product. None if all are."""
    basis, cols = operand.quantizer.basis, operand.shape[1]
    if basis is None or cols % basis.block == 0:
        return exact(operand)
    unit = max(buffer.unit(1) or 1 for buffer in operand.quantizer.layout)
    cut = cols % unit
    whole, last = operand.narrow(1, 0, cols - cut), operand.narrow(1, cols - cut, cols)
    if whole is None or last is None or cols == cut:
        return None
    return exact(whole)._replace(rest=decode(last, torch.float32))


def multiplied_exactly(pair: tuple[Quantizer, Quantizer] | None, device: torch.device) -> bool:
    """Whether operands of these two quantizers are multiplied by way of their exact forms."""
    if pair is None:
        return False
    try:
        kernel = choose("gemm", (pair[0].text, pair[1].text), device).kernel
    except KernelError:  # the product will report it
        return False
    return kernel is not None and registry.ANY in kernel.formats


def why_not(a: Quantizer, b: Quantizer) -> str | None:
    """Why two formats cannot be multiplied so: both need an exact form, in the same basis. None if they can."""
    if a.basis != b.basis:
        return f"{a} and {b} are stored in different bases, and what undoing a rotation gives is not exact in bf16"
    device = torch.device("cuda", torch.cuda.current_device())
    for quantizer in (a, b):
        if isinstance(reason := optional("exact", quantizer, device), str):
            return f"{quantizer} has no exact form in bf16: {reason}"
    return None


def why_not_alpha(a: Quantizer, b: Quantizer) -> str | None:
    """Why not with a factor on the device, which takes a call that torch does not make; None if it can be done."""
    if cublaslt.library() is None:
        return "torch came without cuBLASLt"
    return why_not(a, b)


def bind(p: Product) -> Multiply | None:
    """Multiply as the reference does, up to the order of sums. Factors are applied in a pass of their own."""
    return _bind(p, alpha=False)


def bind_with_alpha(p: Product) -> Multiply | None:
    """Multiply as the reference does, up to the order of sums. Factors of whole matrices are applied before sums are
    written."""
    return _bind(p, alpha=True)


gemm = cached_product(bind)
gemm_with_alpha = cached_product(bind_with_alpha)


def _bind(p: Product, *, alpha: bool) -> Multiply | None:
    (rows, inner), cols, dtype = p.a.shape, p.b.shape[0], p.dtype
    if 0 in (rows, cols, inner):
        return None
    of_a, of_b = _exact_form(p.a, p.device), _exact_form(p.b, p.device)
    if isinstance(of_a, BoundExact) and isinstance(of_b, BoundExact):
        return _of_known_forms(p, of_a, of_b, alpha=alpha)
    any_a, any_b = (of.make if isinstance(of, BoundExact) else of for of in (of_a, of_b))
    with_alpha: dict[tuple[int, bool, torch.dtype], Callable[..., Tensor]] = {}
    """The products with a factor on the device, by the length of the contraction, bias and dtype."""

    def scaled(left: Exact, right: Exact, bias: Tensor | None, dtype: torch.dtype, into: Tensor | None) -> Tensor:
        (first, second), constant = (left.factor, right.factor), left.constant * right.constant
        if first is None and second is None:
            return product(left.matrix, right.matrix, bias, dtype, into)
        if not alpha or (first is not None and first.dim()) or (second is not None and second.dim()):
            return scaled_product(left.matrix, right.matrix, first, second, constant, bias, dtype, into)
        how = left.matrix.shape[1], bias is not None, dtype
        run = with_alpha.get(how)
        if run is None:
            run = with_alpha[how] = bind_product_with_alpha(p.device, rows, cols, *how, p.dispatched)
        return run(left.matrix, right.matrix, first, second, constant, bias, into)

    def multiply(a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        left, right = any_a(a), any_b(b)
        if left is None or right is None or (left.rest is None) != (right.rest is None):
            return gemm_reference(p.a.storage(a), p.b.storage(b), bias, dtype)
        if left.rest is None or right.rest is None:
            return scaled(left, right, bias, dtype, out)
        if left.matrix.shape[1] != right.matrix.shape[1] or left.rest.shape[1] != right.rest.shape[1]:
            return gemm_reference(p.a.storage(a), p.b.storage(b), bias, dtype)  # formats with blocks of other sizes
        y = scaled(left, right, None, torch.float32, None)
        y.addmm_(left.rest, right.rest.t())
        return (y if bias is None else y.add_(bias)).to(dtype)

    return multiply


def _of_known_forms(p: Product, a: BoundExact, b: BoundExact, *, alpha: bool) -> Multiply:
    """Multiply operands whose forms are known: there is a factor in each pass, or in none."""
    of_a, of_b, dtype, constant = a.make, b.make, p.dtype, a.form.constant * b.form.constant
    how = (p.device, p.a.shape[0], p.b.shape[0], p.a.shape[1])
    bound = cache(lambda bias: bind_product_with_alpha(*how, bias, dtype, p.dispatched))

    def multiply(a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        return product(of_a(a).matrix, of_b(b).matrix, bias, dtype, out)

    def scale(a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        left, right = of_a(a), of_b(b)
        matrices, factors = (left.matrix, right.matrix), (left.factor, right.factor)
        if alpha:
            return bound(bias is not None)(*matrices, *factors, constant, bias, out)
        return scaled_product(*matrices, *factors, constant, bias, dtype, out)

    return scale if a.form.factor or b.form.factor else multiply


def _exact_form(operand: Operand, device: torch.device) -> BoundExact | ToExact:
    """The function that makes the exact form of an operand from its buffers."""
    form = operand.form
    if form is not None:
        factor, constant = form.factor, form.constant
        return BoundExact(form, lambda tensors: Exact(tensors[0], tensors[1] if factor else None, constant))
    choice = choose("exact", (operand.quantizer.text,), device)
    if choice.bind is not None and 0 not in operand.shape:
        bound: BoundExact | ToExact | None = choice.bind(operand, device)
        if bound is not None:
            return bound
    impl = choice.impl
    return lambda tensors: impl(operand.storage(tensors)) if impl is not None else None
