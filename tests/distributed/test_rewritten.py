"""A weight that something else than an optimizer wrote to is measured again before it is gathered: stale scales lie."""

from __future__ import annotations

from typing import Any

import torch
from operands import Side, expected, gathered, side, value
from ranks import fully_shard, on_ranks
from support.comparing import equal_states
from torch.distributed.tensor import distribute_tensor

from lpq.observe import collectives

ROWS, COLS = 256, 96
QUANTIZERS = [
    "fp8", "fp8(scaling=delayed, history=4)", "fp8(scaling=row)", "nvfp4(block=16x16)",
    "hybrid(row=mxfp8, col=nvfp4)", "hybrid(row=fp8, col=mxfp8, col_source=row)",
]  # fmt: skip
FACTOR = 100


def _scaled(net: Side) -> None:
    with torch.no_grad():
        for layer in net.layers:
            layer.weight.mul_(FACTOR)


def _copied(net: Side) -> None:
    with torch.no_grad():
        for layer in net.layers:
            layer.weight.copy_(layer.weight * FACTOR)


def _data_copied(net: Side) -> None:
    for layer in net.layers:
        layer.weight.data.copy_(layer.weight.detach() * FACTOR)


def _a_part_of_the_local_tensor(net: Side) -> None:
    for layer in net.layers:
        layer.weight.detach().to_local()[-1].mul_(FACTOR)


def _many_at_once(net: Side) -> None:
    torch._foreach_mul_([layer.weight.detach() for layer in net.layers], FACTOR)


def _state(net: Side) -> dict[str, Any]:
    return {name: t * FACTOR if name.endswith(".weight") else t for name, t in net.state_dict().items()}


def _loaded(net: Side) -> None:
    net.load_state_dict(_state(net))


def _assigned(net: Side) -> None:
    net.load_state_dict(_state(net), assign=True)


def _read_into_its_state_dict(net: Side) -> None:
    """As PyTorch's distributed checkpoints do it."""
    for name, tensor in net.state_dict().items():
        if name.endswith(".weight"):
            tensor.to_local().copy_(tensor.to_local() * FACTOR)


@torch.compile(backend="aot_eager")
def _multiply(weights: list[torch.Tensor]) -> None:
    for weight in weights:
        weight.mul_(FACTOR)


def _compiled(net: Side) -> None:
    with torch.no_grad():
        _multiply([layer.weight for layer in net.layers])


def _a_compiled_step(net: Side) -> None:
    optimizer = torch.optim.SGD([layer.weight for layer in net.layers], lr=0.5)
    for layer in net.layers:
        layer.weight.grad = torch.full_like(layer.weight, -3.0)
    torch.compile(optimizer.step, backend="aot_eager")()
    optimizer.zero_grad()


WAYS = (
    _scaled, _copied, _data_copied, _a_part_of_the_local_tensor, _many_at_once, _loaded, _assigned,
    _read_into_its_state_dict, _compiled, _a_compiled_step,
)  # fmt: skip


@on_ranks(2)
def test_measured_again(rank: int) -> None:
    x = torch.randn(32, COLS)
    for way in WAYS:
        net = side(QUANTIZERS, [value(ROWS, COLS, i) for i in range(len(QUANTIZERS))], "high_precision")
        fully_shard(net)
        gathered(net, x)
        torch.optim.SGD(net.parameters(), lr=1e-3).step()
        before = [layer.weight.full_tensor().detach().clone() for layer in net.layers]
        way(net)
        whole = [layer.weight.full_tensor().detach() for layer in net.layers]
        assert not any(torch.equal(a, b) for a, b in zip(before, whole, strict=True)), way
        states = [layer.weight_state() for layer in net.layers]
        states = [{name: t.clone() for name, t in state.items()} if state else None for state in states]
        with collectives() as seen:
            found = gathered(net, x)
        # after the step of an optimizer, a compiled one too, that was done
        assert [c.kind for c in seen].count("all_reduce") == (way is not _a_compiled_step), way
        for i, text in enumerate(QUANTIZERS):
            for when, direction in (("forward", "row"), ("backward", "col")):
                right = expected(text, whole[i], direction, states[i])
                assert equal_states(found[f"layers.{i}", when], right), (way, text, when)
                if not states[i]:
                    assert not equal_states(right, expected(text, before[i], direction))
        with collectives() as seen:
            gathered(net, x)
        assert "all_reduce" not in [c.kind for c in seen], way


@on_ranks(2)
def test_begun_on_meta(rank: int) -> None:
    """Shards that had no data are given it, in place or by others in their place."""
    for assign in (False, True):
        values = [value(ROWS, COLS, i) for i in range(len(QUANTIZERS))]
        net = side(QUANTIZERS, [v.to("meta") for v in values], "high_precision")
        fully_shard(net)
        assert net.layers[0].weight.is_meta
        net.to_empty(device="cpu")
        given = {}
        for i, v in enumerate(values):
            weight = net.layers[i].weight
            given[f"layers.{i}.weight"] = distribute_tensor(
                v, weight.device_mesh, weight.placements, src_data_rank=None
            )
        net.load_state_dict(given, assign=assign)
        states = [{name: t.clone() for name, t in (layer.weight_state() or {}).items()} for layer in net.layers]
        found = gathered(net, torch.randn(32, COLS))
        for i, text in enumerate(QUANTIZERS):
            for when, direction in (("forward", "row"), ("backward", "col")):
                right = expected(text, values[i], direction, states[i] or None)
                assert equal_states(found[f"layers.{i}", when], right), (assign, text, when)
