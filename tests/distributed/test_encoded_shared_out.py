"""Encoded inputs and gradients of layers that tensor parallelism shares out: taken as they are, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import agreed, mesh_of, on_ranks
from support.comparing import equal
from support.modes import Watched
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.distributed import tensor_parallel as tp
from lpq.observe import Observed, observing


def layer(recipe: str, style: Any, mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    net = lpq.convert(nn.Sequential(nn.Linear(64, 128, bias=False)), recipe)
    return parallelize_module(net, mesh, {"0": style})[0]


class Told:
    """Keeps the values of the input."""

    x: Tensor

    def observe(self, seen: Observed) -> None:
        if seen.name == "x":
            self.x = seen.value


def step(module: Any, x: Tensor) -> list[Tensor]:
    """This rank's part of y, dx and this rank's part of dw."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(torch.sin(torch.arange(float(y.numel()))).view(y.shape))
    dx = x.grad.to_local() if isinstance(x.grad, DTensor) else x.grad
    assert dx is not None
    return [y.detach(), dx, module.weight.grad.to_local()]


@on_ranks(2)
def test_ranks_with_inputs_that_are_encoded_otherwise_all_raise(rank: int) -> None:
    """In a first pass and in a later one: all ranks raise, and go on to work."""
    x = torch.randn(64, 64)
    module = layer("mxfp8", tp.ColwiseParallel(), mesh_of())
    q = module.recipe.x
    right = q.quantize(x)
    others = (
        (lpq.quantizer("mxfp8(dtype=e5m2)").quantize(x), "encoded as mxfp8(dtype=e5m2) (row and column)"),
        (q.quantize(x, col=False), f"encoded as {q.text} (row)"),
        (x, "an input [64, 64] of torch.float32, gradients"),
    )
    for other, words in others:
        for said in agreed(lambda: module((right, other)[rank]), RuntimeError):  # noqa: B023
            assert said.startswith("RuntimeError: the ranks do not call the same layer with equal parts of its input: ")
            assert f"encoded as {q.text} (row and column), gradients" in said, said
            assert words in said, said
        module(right).sum().backward()


@on_ranks(2)
def test_a_part_is_taken_however_it_comes_to_the_layer(rank: int) -> None:
    """As a DTensor, in a mode, and where an observer is told of it."""
    mesh = mesh_of()
    torch.manual_seed(1)
    rows, columns = torch.randn(64, 64), torch.randn(64, 64).chunk(2, 1)[rank].contiguous()
    styles: tuple[tuple[Any, Tensor, Any], ...] = (
        (tp.ColwiseParallel(), torch.randn(64, 64), Replicate()),
        (tp.ColwiseParallel(input_layouts=Shard(0)), rows, Shard(0)),
        (tp.RowwiseParallel(), columns, Shard(1)),
    )
    for style, part, placement in styles:
        module = layer("mxfp8", style, mesh)
        q, expected = module.recipe.x, step(module, part)
        assert equal(step(module, DTensor.from_local(q.quantize(part), mesh, [placement], run_check=False)), expected)
        with Watched():
            assert equal(step(module, q.quantize(part)), expected)
        with observing(module, Told()) as told:
            assert equal(step(module, q.quantize(part)), expected)
        assert equal(told.x, q.quantize(part).dequantize())
        with pytest.raises(ValueError, match=r"layer 0, .*: the row operand of the input is encoded as mxfp8\(dtype="):
            module(lpq.quantizer("mxfp8(dtype=e5m2)").quantize(part))


@pytest.mark.parametrize("layout", [Shard(0), Replicate()])
@on_ranks(2)
def test_layers_share_it(rank: int, layout: Any) -> None:
    """The gradients of the input are added before they are summed over the ranks, as without an encoding."""
    pair = nn.ModuleDict({name: nn.Linear(64, 128, bias=False) for name in ("left", "right")})
    plan = {name: tp.ColwiseParallel(input_layouts=layout) for name in pair}
    pair = parallelize_module(lpq.convert(pair, "mxfp8"), mesh_of(), plan)
    torch.manual_seed(1)
    given, found = torch.randn(64, 64), []
    for x in (given, lpq.quantizer("mxfp8").quantize(given)):
        pair.zero_grad()
        x = x.detach().requires_grad_()
        ys = [module(x) for module in pair.values()]
        torch.cat(ys, 1).sin().sum().backward()
        found.append([*ys, x.grad, *(p.grad.to_local() for p in pair.parameters())])
    assert equal(*found)


@on_ranks(2)
def test_a_layer_says_why_it_takes_a_part_not(rank: int) -> None:
    """Where parts are no parts of the encoded whole, or the layer would have to lay them out otherwise."""
    mesh, q = mesh_of(), lpq.quantizer("mxfp8")
    cut = r"gathered in high precision: shards of 16 rows cut the blocks of 32 of mxfp8\. Pass the tensor before it"
    for style, part, words in (
        (tp.ColwiseParallel(input_layouts=Shard(0)), torch.ones(16, 64), cut),
        (tp.ColwiseParallel(input_layouts=Shard(1)), torch.ones(64, 32), r"as S\(1\), and the layer multiplies R\."),
        (tp.RowwiseParallel(input_layouts=Replicate()), torch.ones(64, 64), r"as R, and the layer multiplies S\(1\)\."),
    ):
        module = layer("mxfp8", style, mesh)
        for mode in (torch.enable_grad(), Watched()):
            with mode:
                module(part)  # of the same kind, but for the encoding
                with pytest.raises(ValueError, match=f"layer 0, .*: its input is encoded already, and .*{words}"):
                    module(q.quantize(part))
    module = layer("mxfp8", tp.RowwiseParallel(output_layouts=Shard(0)), mesh)
    y = module(torch.ones(32, 32))
    y.register_hook(q.quantize)
    with pytest.raises(
        TypeError, match=r"layer 0, .* arrived encoded as mxfp8, and the ranks' parts of it are gathered"
    ):
        y.sum().backward()
    assert module.weight.grad is None


@on_ranks(2)
def test_a_bias_that_trains_refuses_a_gradient(rank: int) -> None:
    """It is added to the sum over the ranks, or to this rank's columns."""
    mesh, q = mesh_of(), lpq.quantizer("mxfp8")
    for style, features in ((tp.RowwiseParallel(), 32), (tp.ColwiseParallel(), 64)):
        net = lpq.convert(nn.Sequential(nn.Linear(64, 128)), "mxfp8")
        module = parallelize_module(net, mesh, {"0": style})[0]
        x = torch.randn(64, features)
        for trains in (True, False):
            module.bias.requires_grad_(trains)
            module.zero_grad()
            module(x).sum().backward()
            expected, module.weight.grad = module.weight.grad.to_local(), None
            y = module(x)
            y.register_hook(lambda dy: q.quantize(dy.contiguous()))
            if trains:
                with pytest.raises(TypeError, match=r"layer 0, .*the gradient of its bias is a sum in high precision"):
                    y.sum().backward()
                assert module.weight.grad is None
            else:
                y.sum().backward()
                assert torch.equal(module.weight.grad.to_local(), expected)
