"""What layers multiply and encode, noted: what they bind is bound anew, by functions that note it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from lpq.core.binding import Multiply, Product
from lpq.core.bound import Encoder, Wanted
from lpq.nn import linear, multiply, plan


def products(monkeypatch: pytest.MonkeyPatch) -> list[Product]:
    """The products that layers make from now on."""
    made: list[Product] = []
    bind = plan.bind_product

    def noted(product: Product) -> Multiply:
        run = bind(product)

        def call(a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None) -> Tensor:
            made.append(product)
            return run(a, b, bias)

        return call

    monkeypatch.setattr(plan, "bind_product", noted)
    _bind_anew(monkeypatch)
    return made


def encodings(monkeypatch: pytest.MonkeyPatch) -> list[Wanted]:
    """What layers encode from now on, weights that are held not among it."""
    made: list[Wanted] = []
    bind = plan.bind_encoder

    def noted(wanted: Wanted) -> Encoder:
        encoder = bind(wanted)

        def encode(*args: Any) -> Any:
            made.append(wanted)
            return encoder.encode(*args)

        return encoder._replace(encode=encode)

    monkeypatch.setattr(plan, "bind_encoder", noted)
    _bind_anew(monkeypatch)
    return made


def _bind_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear, multiply):
        monkeypatch.setattr(module, "bind_few", plan.bind)
