"""Notes of the operands that layers multiply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor, nn

import lpq
from lpq.core import Storage
from lpq.nn import multiply, parallel, step
from lpq.operations.binding import Multiply, Product

Products = list[tuple[Storage, Storage, dict[str, Any]]]


@contextmanager
def multiplied(model: nn.Module) -> Iterator[Products]:
    """The operands of the products that layers of a model make inside by bound calls, with the options of
    ``lpq.gemm``. A product that is made as its operand arrives is not among them."""
    products: Products = []
    bind: Callable[[Product], Multiply] = step.bind_product

    def noting(product: Product) -> Multiply:
        run = bind(product)

        def call(a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None) -> Tensor:
            options = {"bias": bias, "dtype": product.dtype, "fast_accumulate": product.fast_accumulate}
            products.append((product.a.storage(a), product.b.storage(b), options))
            return run(a, b, bias)

        return call

    for layer in model.modules():
        if isinstance(layer, lpq.nn.Linear):
            layer.passes.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "bind_product", noting)
        for module in (multiply, parallel):
            patch.setattr(module, "bind_few", step.bind)
        yield products
