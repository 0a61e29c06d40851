"""The first step with ``fresh=measure`` on several ranks: it has the bytes of a recipe that measures each tensor, under
tensor parallelism and where FSDP2 gathers weights, and all ranks end it together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import fully_shard, mesh_of, on_ranks
from sharded import whole
from support.comparing import equal
from support.small_models import shared_out
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lpq
from lpq.optim import MasterWeights

FRESH = "scaling=delayed, history=3, fresh=measure"
STATE = "scaling=delayed, history=3"
FORMS = {
    "alike": "x=fp8({0}), w=fp8({0}), dy=fp8({0})",
    "sides": "x=hybrid(row=fp8({0}), col=fp8({0})), w=hybrid(row=mxfp8, col=fp8({0})), dy=fp8({0})",
    "of_row": "x=hybrid(row=fp8({0}), col=fp8({0}), col_source=row), w=fp8({0}), dy=fp8({0})",
}
Prepare = Callable[[Any], nn.Module]


def _batch(rank: int, number: int) -> Tensor:
    """The values of rank 1 are larger."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * number + rank)) * 1e-3 * 4**rank
    return x.requires_grad_()


def _train(
    recipe: str, weights: Any, prepare: Prepare, rank: int, steps: int, backend: str | None = None
) -> tuple[list[Tensor], set[Any]]:
    torch.manual_seed(0)
    own: Any = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    net = prepare(lpq.convert(own, recipe, weights=weights))
    if backend is not None:
        torch.compiler.reset()  # or torch, which compiles a function eight times, may leave it uncompiled
        own[0].compile(backend=backend)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    if weights == "quantized":
        optimizer = MasterWeights(optimizer)
    found: list[Tensor] = []
    for step in range(steps):
        for part in range(2):
            x = _batch(rank, 2 * step + part)
            y = net(x)
            (y.square().sum() * 1e-4).backward()
            assert x.grad is not None
            found += [whole(y.detach()).clone(), x.grad.clone()]
        found += [whole(p.grad).clone() for p in net.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found, {own[i].passes.fresh for i in (0, 2)}


def _columns_and_rows(net: Any) -> nn.Module:
    return parallelize_module(net, mesh_of(), shared_out("0", "2"))


def _sequences(net: Any) -> nn.Module:
    return parallelize_module(net, mesh_of(), shared_out("0", "2", 0))


def _replicated(net: Any) -> nn.Module:
    return DistributedDataParallel(net, broadcast_buffers=False)


def _units(net: Any) -> nn.Module:
    for layer in (net[0], net[2]):
        fully_shard(layer)
    return fully_shard(net)  # type: ignore[no-any-return]


def _kept(net: Any) -> nn.Module:
    return fully_shard(net, reshard_after_forward=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("form", "weights", "prepare"),
    [
        *((form, None, prepare) for form in FORMS for prepare in (_columns_and_rows, _sequences)),
        *(("sides", *way) for way in (
            (None, _replicated), (None, _units), ("high_precision", _units), ("high_precision", _kept),
            ("quantized", _units),
        )),
        ("of_row", "high_precision", _units),
    ],
)  # fmt: skip
@on_ranks(2)
def test_the_first_step_is_measured(rank: int, form: str, weights: Any, prepare: Prepare) -> None:
    """Each form where ranks exchange the statistics of inputs and gradients; elsewhere the form that has all, and where
    weights are gathered the one whose column operand is made of another."""
    same = 0 if prepare in (_columns_and_rows,) else rank  # ranks have the same input there
    (later, fresh), (measured, _), (recalled, _) = (
        _train(FORMS[form].format(how), weights, prepare, same, steps)
        for how, steps in ((FRESH, 3), ("", 3), (STATE, 1))
    )
    first = len(recalled)  # the tensors of a step
    assert equal(later[:first], measured[:first])
    assert not equal(later[:first], recalled)
    assert fresh == {()}
    assert not equal(later[first:], measured[first:])


@on_ranks(2)
def test_the_first_step_of_compiled_layers_is_measured(rank: int) -> None:
    """And each later one recalls, after torch compiled the layers anew for it. ``tests/nn/test_fresh_states.py``
    compiles other forms."""
    recipe = FORMS["of_row"].format(FRESH)
    (compiled, fresh), (eager, _) = (_train(recipe, None, _sequences, rank, 2, how) for how in ("eager", None))
    assert equal(compiled, eager)
    assert fresh == {()}


@pytest.mark.parametrize(("weights", "prepare"), [("high_precision", _units), (None, _replicated)])
@on_ranks(2)
def test_eden_takes_the_amax_of_the_step_before(rank: int, weights: Any, prepare: Prepare) -> None:
    """The amaxes of x and dy; the weight travels as its row operand."""
    (late, fresh), (measured, _) = (
        _train(recipe, weights, prepare, rank, 2) for recipe in ("nvfp4-eden-delayed", "nvfp4-eden")
    )
    first = len(late) // 2
    assert equal(late[:first], measured[:first])
    assert not equal(late[first:], measured[first:])
    assert fresh == {()}
