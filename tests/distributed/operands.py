"""A model of many layers, each with a quantizer of its own, and what its weights are in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from support.comparing import copy_bytes, equal_states
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import lpq
from lpq.core import QuantizedTensor, encode_operands

SEES = Callable[[str, str, Tensor], None]
"""Called with a layer's name, ``forward`` or ``backward``, and the weight as the layer has it there."""


class Side(nn.Module):
    """Layers side by side: each sees the same input."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).sum(1) for layer in self.layers]).sum(0)


def side(quantizers: Sequence[str], values: Sequence[Tensor], weights: Any, ranks: int | None = None) -> Side:
    """One layer for each quantizer and value of its weight, converted."""
    layers = []
    for value in values:
        layer = nn.Linear(value.shape[1], value.shape[0], bias=False, dtype=value.dtype, device="meta")
        layer.weight = nn.Parameter(value.clone())
        layers.append(layer)
    rules = [
        {"match": f"layers.{i}", "recipe": f"x=mxfp8(), w={text if text.endswith(')') else text + '()'}, dy=mxfp8()"}
        for i, text in enumerate(quantizers)
    ]
    made = lpq.convert(Side(layers), {"rules": rules}, weights=weights, ranks=ranks)
    assert isinstance(made, Side)
    return made


def value(rows: int, cols: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights of all magnitudes; the largest is in the last row, so that one rank alone knows it."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=random) * torch.rand(rows, 1, generator=random).mul(8).sub(8).exp2()
    x[-1, cols // 2] = 50.0
    return x.to(dtype)


def read(weight: Tensor, direction: str) -> dict[str, Tensor]:
    """The bytes of one operand of a gathered weight, copied, or those of its values if it is an ordinary tensor."""
    if not isinstance(weight, QuantizedTensor):
        return {"values": copy_bytes(weight)}
    operand = weight.row if direction == "row" else weight.col
    assert operand is not None
    return {name: copy_bytes(buffer) for name, buffer in operand.buffers().items()}


def expected(quantizer: Any, x: Tensor, direction: str, state: Any = None) -> dict[str, Tensor]:
    """The bytes of quantizing the whole tensor."""
    row = direction == "row"
    encoded = encode_operands(lpq.quantizer(str(quantizer)), x, row=row, col=not row, state=state)
    operand = encoded.row if row else encoded.col
    assert operand is not None
    return {name: copy_bytes(buffer) for name, buffer in operand.buffers().items()}


@contextmanager
def watched(model: nn.Module, sees: SEES) -> Iterator[None]:
    """Have every converted layer's weight seen in forward and in backward, where FSDP2 has gathered it."""
    handles = []
    for name, layer in model.named_modules():
        if isinstance(layer, lpq.nn.Linear):

            def forward(layer: Any, *_: Any, name: str = name) -> None:
                sees(name, "forward", layer.weight)

            def backward(layer: Any, *_: Any, name: str = name) -> None:
                sees(name, "backward", layer.weight)

            handles.append(layer.register_forward_hook(forward))
            handles.append(layer.register_full_backward_hook(backward))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gathered(model: nn.Module, x: Tensor) -> dict[tuple[str, str], dict[str, Tensor]]:
    """The bytes of every gathered weight of one forward and backward: row operands in one, columns in the other."""
    found: dict[tuple[str, str], dict[str, Tensor]] = {}

    def sees(name: str, when: str, weight: Tensor) -> None:
        assert not isinstance(weight, DTensor)
        found[name, when] = read(weight, "row" if when == "forward" else "col")

    with watched(model, sees):
        model(x.clone().requires_grad_()).float().square().mean().backward()
    return found


State = dict[str, Tensor] | None


def memories(net: Side) -> list[State]:
    """Each layer's memory of its weight, before it moves."""
    states = [layer.states().get("w") for layer in net.layers]  # type: ignore[operator]
    return [{name: tensor.clone() for name, tensor in state.items()} if state else None for state in states]


def check_gathered(
    net: Side, quantizers: Sequence[str], wholes: Sequence[Tensor], states: Sequence[State], x: Tensor
) -> None:
    """The gathered weights of one forward and backward have the bytes of quantizing whole weights."""
    found = gathered(net, x)
    assert len(found) == 2 * len(quantizers)
    for i, (text, whole, state) in enumerate(zip(quantizers, wholes, states, strict=True)):
        for when, direction in (("forward", "row"), ("backward", "col")):
            assert equal_states(found[f"layers.{i}", when], expected(text, whole, direction, state)), (text, when)


def as_shard_of(parameter: Tensor, whole: Tensor) -> Tensor:
    """Cut a tensor as a parameter is."""
    assert isinstance(parameter, DTensor)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
