"""Notes of all that layers multiply, encode and keep for backward: their calls are bound anew, to note each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lpq.distributed.shard import plain
from lpq.nn import linear, multiply, step
from lpq.operations.binding import Multiply, Product
from lpq.operations.encoder import Encoder, EncoderSpec


def products(monkeypatch: pytest.MonkeyPatch) -> list[Product]:
    """The products that layers make from now on, by bound calls or by operators."""
    made: list[Product] = []

    def noting(bind: Callable[[Product], Multiply]) -> Callable[[Product], Multiply]:
        def noted(product: Product) -> Multiply:
            run = bind(product)

            def call(a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None) -> Tensor:
                made.append(product)
                return run(a, b, bias)

            return call

        return noted

    for name in ("bind_product", "product_through_operators"):
        monkeypatch.setattr(step, name, noting(getattr(step, name)))
    _bind_anew(monkeypatch)
    return made


def encodings(monkeypatch: pytest.MonkeyPatch) -> list[EncoderSpec]:
    """Note all that layers encode from now on, by bound calls or by operators; held weights are not among it."""
    made: list[EncoderSpec] = []

    def noting(bind: Callable[[EncoderSpec], Encoder]) -> Callable[[EncoderSpec], Encoder]:
        def noted(wanted: EncoderSpec) -> Encoder:
            encoder = bind(wanted)

            def encode(*args: Any) -> Any:
                made.append(wanted)
                return encoder.encode(*args)

            return encoder._replace(encode=encode)

        return noted

    for name in ("bind_encoder", "through_operators"):
        monkeypatch.setattr(step, name, noting(getattr(step, name)))
    _bind_anew(monkeypatch)
    return made


def _bind_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear, multiply):
        monkeypatch.setattr(module, "bind_few", step.bind)


def kept_for_backward(forward: Callable[[], Tensor], besides: Iterable[Tensor] = ()) -> tuple[Tensor, int]:
    """Return the output of ``forward``, and the bytes that autograd keeps for backward, each memory counted once.

    Args:
        besides: tensors whose memory does not count
    """
    memories: dict[int, int] = {}
    others = {t.untyped_storage().data_ptr() for t in besides}

    def pack(saved: Tensor) -> Tensor:
        memory = plain(saved).untyped_storage()
        if memory.data_ptr() not in others:
            memories[memory.data_ptr()] = memory.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        return forward(), sum(memories.values())
