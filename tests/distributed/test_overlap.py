"""Tensors that travel while a layer multiplies: the order of gathers and products, on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from ranks import spawn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.distributed import tensor_parallel as tp
from lpq.torch_private.dispatch import TorchDispatchMode, schema_of

WIDTH, TOKENS = 128, 128
NAMED = {"all_gather_into_tensor_coalesced": "begin", "wait_tensor": "wait", "gemm": "multiply"}


class _Order(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The order in which gathers begin, are waited for, and products are made; the same several times is one entry."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = NAMED.get(schema_of(func).name.partition("::")[2])
        if name is not None and self.seen[-1:] != [name]:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def _in_turn(rank: int, recipe: str, expected: list[str]) -> None:
    torch.manual_seed(0)
    net = lpq.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)), recipe)
    parallelize_module(net, init_device_mesh("cpu", (2,)), {"0": tp.RowwiseParallel(output_layouts=Shard(0))})
    y = net(torch.randn(TOKENS, WIDTH // 2, requires_grad=True))
    order = _Order()
    with order:
        y.sum().backward()
    assert order.seen == expected, order.seen


def test_the_column_operand_of_a_gradient_travels_while_dx_is_made() -> None:
    spawn(_in_turn, 2, "nvfp4", ["wait", "begin", "wait", "multiply", "wait", "multiply"])


def test_a_column_operand_that_follows_from_the_row_operand_does_not_travel() -> None:
    spawn(_in_turn, 2, "fp8-current", ["wait", "begin", "wait", "multiply"])
