"""A weight that something else than an optimizer wrote to is measured again before it is gathered: stale scales lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from operands import as_shard_of, check_gathered, expected, gathered, memories, side, value
from ranks import fully_shard, on_ranks
from support.comparing import equal_states
from torch import Tensor

from lpq.observe import collectives

ROWS, COLS = 256, 96
QUANTIZERS = [
    "fp8", "fp8(scaling=delayed, history=4)", "fp8(scaling=row)", "nvfp4(block=16x16)",
    "hybrid(row=mxfp8, col=nvfp4)", "hybrid(row=fp8, col=mxfp8, col_source=row)",
]  # fmt: skip
FACTOR = 100


def _weights(net: Any) -> list[Any]:
    return [layer.weight for layer in net.layers]


def _of_each(write: Callable[[Any], object]) -> Callable[[Any], None]:
    """Write to each weight by itself."""

    @torch.no_grad()
    def write_all(net: Any) -> None:
        for weight in _weights(net):
            write(weight)

    return write_all


def _state(net: Any) -> dict[str, Any]:
    return {name: t * FACTOR if name.endswith(".weight") else t for name, t in net.state_dict().items()}


def _read_into_its_state_dict(net: Any) -> None:
    """As PyTorch's distributed checkpoints do it."""
    for name, tensor in net.state_dict().items():
        if name.endswith(".weight"):
            tensor.to_local().copy_(tensor.to_local() * FACTOR)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on one rank what both do."""
    return torch.compile(function, backend="aot_eager") if dist.get_rank() == 0 else function


@torch.no_grad()
def _in_a_graph(net: Any) -> None:
    def multiply(weights: list[Tensor]) -> None:
        for weight in weights:
            weight.mul_(FACTOR)

    _compiled(multiply)(_weights(net))


def _a_compiled_step(net: Any) -> None:
    optimizer = torch.optim.SGD(_weights(net), lr=0.5)
    for weight in _weights(net):
        weight.grad = torch.full_like(weight, -3.0)
    _compiled(optimizer.step)()
    optimizer.zero_grad()


WAYS: dict[str, Callable[[Any], object]] = {
    "scaled": _of_each(lambda weight: weight.mul_(FACTOR)),
    "copied": _of_each(lambda weight: weight.copy_(weight * FACTOR)),
    "data copied": _of_each(lambda weight: weight.data.copy_(weight.detach() * FACTOR)),
    "a part of the local tensor": _of_each(lambda weight: weight.detach().to_local()[-1].mul_(FACTOR)),
    "many at once": lambda net: torch._foreach_mul_([weight.detach() for weight in _weights(net)], FACTOR),
    "loaded": lambda net: net.load_state_dict(_state(net)),
    "assigned": lambda net: net.load_state_dict(_state(net), assign=True),
    "read into its state dict": _read_into_its_state_dict,
    "in a graph": _in_a_graph,
    "a compiled step": _a_compiled_step,
}


@on_ranks(2)
def test_measured_again(rank: int) -> None:
    x = torch.randn(32, COLS)
    for name, way in WAYS.items():
        net = fully_shard(side(QUANTIZERS, [value(ROWS, COLS, i) for i in range(len(QUANTIZERS))], "high_precision"))
        gathered(net, x)
        torch.optim.SGD(net.parameters(), lr=1e-3).step()
        before = [weight.full_tensor().detach().clone() for weight in _weights(net)]
        way(net)
        wholes, states = [weight.full_tensor().detach() for weight in _weights(net)], memories(net)
        assert not any(torch.equal(a, b) for a, b in zip(before, wholes, strict=True)), name
        with collectives() as seen:
            check_gathered(net, QUANTIZERS, wholes, states, x)
        # after the step of an optimizer, a compiled one too, that was done
        assert [c.kind for c in seen].count("all_reduce") == (name != "a compiled step"), name
        for text, state, *both in zip(QUANTIZERS, states, wholes, before, strict=True):
            for direction in () if state else ("row", "col"):
                assert not equal_states(*(expected(text, whole, direction) for whole in both)), (name, text)
        with collectives() as seen:
            gathered(net, x)
        assert "all_reduce" not in [c.kind for c in seen], name


@on_ranks(2)
def test_begun_on_meta(rank: int) -> None:
    """Shards that had no data are given it, in place or by others in their place."""
    for assign in (False, True):
        values = [value(ROWS, COLS, i) for i in range(len(QUANTIZERS))]
        net = fully_shard(side(QUANTIZERS, [v.to("meta") for v in values], "high_precision"))
        assert net.layers[0].weight.is_meta
        net.to_empty(device="cpu")
        shards = {f"layers.{i}.weight": as_shard_of(net.layers[i].weight, v) for i, v in enumerate(values)}
        net.load_state_dict(shards, assign=assign)
        check_gathered(net, QUANTIZERS, values, memories(net), torch.randn(32, COLS))
