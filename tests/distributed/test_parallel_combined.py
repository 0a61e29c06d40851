"""Tensor parallelism together with what else trains a model: the compiler, checkpointing, FSDP2, files."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from pool import forget_compiled
from ranks import imitated_ranks, mesh_of, on_ranks
from sharded import whole
from support.comparing import equal
from support.small_models import Gated, Siblings
from support.small_models import gated_plan as plan
from test_modes_and_nan import HYBRID
from test_tensor_parallel import BATCH, INNER, TOKENS, WIDTH, agree, data, joined, model, run
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import lpq
from lpq.distributed import tensor_parallel as tp


def compiled(rank: int, style: Any, recipe: str, steps: int = 1, device: str = "cpu", **how: Any) -> list[str]:
    """Bit for bit what a layer computes that is not compiled; the code of the first step. The compiler records graphs
    at the second step."""
    found: list[list[Tensor]] = [[], []]
    codes: list[str] = []
    for results, is_compiled in zip(found, (False, True), strict=True):
        torch.manual_seed(0)
        net = lpq.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)).to(device), recipe)
        parallelize_module(net, mesh_of(device=device), {"0": style})
        if is_compiled:
            net.compile(fullgraph=True, **how)
        dims = (1, 2) if isinstance(style, tp.ColwiseParallel) else (2, 1)
        for step in range(1, steps + 1):
            x, dy = (t.chunk(2, d)[rank].to(device, torch.bfloat16) * step for t, d in zip(data(), dims, strict=True))
            x, dy = x.contiguous().requires_grad_(), dy.contiguous()

            def one(net: Any = net, x: Tensor = x, dy: Tensor = dy) -> Tensor:
                y: Tensor = net(x)
                y.backward(dy)
                return y

            if is_compiled and not codes and device == "cpu":
                y, codes = run_and_get_code(one)
            else:
                y = one()
            assert x.grad is not None
            results += [y.detach().clone(), x.grad.clone(), whole(net[0].weight.grad).clone()]
            net.zero_grad()
    forget_compiled()  # or recorded graphs would keep the group from ending
    assert equal(*found)
    return codes


@on_ranks(2)
def test_compiled(rank: int) -> None:
    """It reduces seeds, and one value alone. How codes are joined takes kernels, each of them Inductor's time. dx is
    summed while dw is made, if Inductor does not seek another order to save memory."""
    style, recipe = tp.ColwiseParallel(input_layouts=Shard(1)), "x=fp8(), w=fp8(), dy=nvfp4(stochastic=true)"
    options = {"reorder_for_peak_memory": False, "fx_graph_cache": False}
    codes = compiled(rank, style, recipe, options=options)
    (begun,) = re.finditer(r"(\w+) = \S+reduce_scatter_tensor\.default\(", codes[-1])
    products = [found.start() for found in re.finditer(r"gemm\(", codes[-1])]
    of_dx, of_dw = products[-2:]
    assert of_dx < begun.start() < of_dw < codes[-1].index(f"wait_tensor.default({begun[1]})"), codes[-1]


@on_ranks(2)
def test_compiled_of_each_kind(rank: int) -> None:
    """A layer whose weight is divided by rows reduces the statistics of x and w, and sums y over the ranks."""
    rows, columns = tp.RowwiseParallel(output_layouts=Shard(1)), tp.ColwiseParallel(input_layouts=Shard(1))
    for style, recipe in ((rows, "fp8-row"), (columns, "fp8-delayed"), (columns, HYBRID)):
        compiled(rank, style, recipe, backend="aot_eager")


@pytest.mark.starts
@pytest.mark.parametrize(("recipe", "reduced"), [("fp8-current", 3), ("mxfp8", 0)])
def test_a_compiler_gathers_once_what_layers_share(recipe: str, reduced: int) -> None:
    """Also where its statistics span ranks. A column operand of its own is gathered in backward, once for both;
    torch 2.11 gathers it in forward."""
    from torch._dynamo.backends.common import aot_autograd

    seen: list[Counter[str]] = []

    def count(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.append(Counter(node.target.name() for node in module.graph.nodes if hasattr(node.target, "name")))
        return make_boxed_func(module.forward)

    column = tp.ColwiseParallel(input_layouts=Shard(1))
    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    with imitated_ranks():
        net = lpq.convert(Siblings(WIDTH, WIDTH, WIDTH, bias=False), recipe)
        parallelize_module(net, mesh_of(), {"q": column, "k": column})
        net.compile(fullgraph=True, backend=backend)
        net(data()[0].chunk(2, 1)[0].clone().requires_grad_()).sum().backward()
        forget_compiled()
    assert [graph["lpq::gemm"] for graph in seen] == [2, 4]
    gathers = [graph["_c10d_functional::all_gather_into_tensor_coalesced"] for graph in seen]
    assert gathers[0] == 1 or torch.__version__ < "2.13", gathers
    assert sum(gathers) <= 2, gathers
    assert seen[0]["lpq::quantize"] == 3, seen[0]  # of the input and of two weights
    assert seen[0]["_c10d_functional::all_reduce"] == reduced, seen[0]  # likewise


@on_ranks(2)
def test_what_compiled_layers_share_is_as_in_eager(rank: int) -> None:
    """Inductor's code has torch's own waits, for which it keeps memory, and one gather for both layers in a pass. Ranks
    sum the gradient of the input layer by layer, as where each layer gets a clone."""
    column = tp.ColwiseParallel(input_layouts=Shard(1))
    found: list[list[Tensor]] = []
    for way in ("clones", "shared", "compiled"):
        torch.manual_seed(0)
        net = lpq.convert(Siblings(WIDTH, WIDTH, INNER, bias=False), "fp8-current")
        parallelize_module(net, mesh_of(), {"q": column, "k": column})
        if way == "compiled":
            net.compile(fullgraph=True, options={"fx_graph_cache": False})
        elif way == "clones":
            net.forward = lambda x, net=net: torch.cat([net.q(x), net.k(x.clone())], -1)
        x = data()[0].chunk(2, 1)[rank].contiguous().requires_grad_()

        def one(net: Any = net, x: Tensor = x) -> Tensor:
            y: Tensor = net(x)
            y.backward(y.detach() + 1)
            return y

        y, codes = run_and_get_code(one) if way == "compiled" else (one(), [])
        assert x.grad is not None
        found.append([x.grad, y.detach(), *(whole(p.grad) for p in net.parameters())])
    forget_compiled()
    clones, shared, traced = found
    assert equal(traced, clones)
    assert equal(traced[1:], shared[1:])
    assert [code.count("all_gather_into_tensor_coalesced.default(") <= 1 for code in codes] == [True, True]
    assert not any("ops.lpq.arrived" in code for code in codes)


@on_ranks(2)
def test_checkpointed(rank: int) -> None:
    def checkpointed(net: Gated) -> None:
        forward = net.forward
        net.forward = lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]

    agree(run("fp8-delayed", True, False, prepare=checkpointed), run("fp8-delayed", True, False))


@on_ranks(2)
def test_compiled_with_a_checkpoint_and_random_bits(rank: int) -> None:
    """The checkpoint is in the compiled function, or around it. Where it is inside, the seeds are saved: torch 2.13
    failed where backward drew them again."""
    compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)
    checkpointed = partial(partial, checkpoint, use_reentrant=False)

    def prepare(net: Gated) -> None:
        """One layer each: a layer takes a compiler seconds."""
        net.left.forward = checkpointed(compiled(net.left.forward))  # type: ignore[method-assign]
        net.right.forward = compiled(checkpointed(net.right.forward))  # type: ignore[method-assign]

    agree(run("nvfp4", True, False, prepare=prepare), run("nvfp4", True, False))


@pytest.mark.starts
@pytest.mark.skipif(torch.__version__ < "2.13", reason="it was found in torch 2.13")
def test_torch_cannot_compile_a_checkpoint_that_draws_random_numbers() -> None:
    """Where this works the guide can leave out a remedy."""
    with imitated_ranks():
        net = nn.Sequential(nn.Dropout(), nn.Linear(WIDTH, WIDTH))
        parallelize_module(net, mesh_of(), {"1": torch_styles.ColwiseParallel()})
        compiled = torch.compile(lambda x: checkpoint(net, x, use_reentrant=False), backend="aot_eager")
        with pytest.raises(AssertionError, match="expected all tensors_saved_with_vc_check to be Tensors"):
            compiled(torch.ones(4, WIDTH, requires_grad=True))


# ---------------------------------------------------------------------------------- FSDP2


def _trained(
    recipe: str, shape: tuple[int, int] | None, device: str, weights: Any = None, steps: int = 2
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of some steps and the weights after them; ``shape``: of the mesh, with FSDP2 along the first axis."""
    net = model().to(device)
    lpq.convert(net, recipe, weights=weights)
    if shape is not None:
        mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], plan(sequence=False))
        fully_shard(net, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        x = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        loss = (net(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: whole(p.detach()) for name, p in net.named_parameters()}


def with_fsdp(rank: int, recipe: str, shape: tuple[int, int], device: str = "cpu") -> None:
    """FSDP2 and tensor parallelism on a mesh of this shape train as one process does."""
    losses, trained = _trained(recipe, shape, device)
    expected, whole_weights = _trained(recipe, None, device)
    assert losses == pytest.approx(expected, rel=1e-4)
    agree(trained, whole_weights, 1e-3)


def gathered_with_fsdp(rank: int, recipe: str, shape: tuple[int, int], device: str = "cpu") -> None:
    """The same by weights that are gathered quantized, to the bit."""
    (losses, trained), (expected, weights) = (_trained(recipe, shape, device, w) for w in ("high_precision", None))
    assert losses == expected
    assert equal(trained.values(), weights.values())


@on_ranks(4)
def test_with_fsdp2(rank: int) -> None:
    """``test_sharded_twice`` has weights that are gathered quantized, which train as these do."""
    with_fsdp(rank, "fp8-current", (2, 2))


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
@on_ranks(2)
def test_gathered_with_fsdp2(rank: int, shape: tuple[int, int]) -> None:
    gathered_with_fsdp(rank, "fp8-current", shape)


# ---------------------------------------------------------------------------------- other styles, files


class Attention(nn.Module):
    """Layers that share an input, and the shape of that."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:-1], -1, 32)
        q, k, v = (layer(x).view(heads).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        y: Tensor = self.o(attended.transpose(1, 2).flatten(2))
        return y


@pytest.mark.parametrize("local", [False, True])
@on_ranks(2)
def test_an_input_that_is_prepared_for_several_layers(rank: int, local: bool) -> None:
    """The parent of q, k and v is told how its input lies."""
    found = []
    for parallel in (False, True):
        torch.manual_seed(0)
        net = lpq.convert(nn.Sequential(Attention()), "mxfp8")
        mine, grad = data()
        if parallel:
            mine, grad = (t.chunk(2, 1)[rank].contiguous() for t in (mine, grad))
            styles = {
                "0": tp.PrepareInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                **{f"0.{name}": tp.ColwiseParallel() for name in "qkv"},
                "0.o": tp.RowwiseParallel(output_layouts=Shard(1), use_local_output=local),
            }
            parallelize_module(net, mesh_of(), styles)
        mine = mine.clone().requires_grad_()
        y = net(mine)
        assert isinstance(y, DTensor) is (parallel and not local)
        y = y.to_local() if isinstance(y, DTensor) else y
        y.backward(grad)
        assert mine.grad is not None
        made = {"y": y.detach(), "dx": mine.grad}
        made = {name: joined(t) for name, t in made.items()} if parallel else made
        found.append(made | {name: whole(p.grad) for name, p in net.named_parameters() if p.grad is not None})
    agree(found[1], found[0])


@on_ranks(4)
def test_a_checkpoint_loads_on_another_layout(rank: int, tmp_path: Path) -> None:
    """A file of FSDP2 and two ranks goes on on four ranks, on others of both, and in one process; with weights that are
    gathered quantized, and with others."""
    mesh = mesh_of("dp", "tp")

    def made(layout: str, seed: int) -> tuple[Gated, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        weights: Any = "high_precision" if layout == "gathered" else None
        recipe = "x=fp8(scaling=delayed), w=fp8(), dy=fp8(scaling=delayed)"
        net = lpq.convert(Gated(WIDTH, INNER), recipe, weights=weights)
        if layout != "alone":
            parallelize_module(net, mesh_of() if layout == "four" else mesh["tp"], plan(False))
        if layout in ("both", "gathered"):
            fully_shard(net, mesh=mesh["dp"])
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    net, optimizer = made("gathered", 0)
    x, dy = data()
    net(x).backward(dy)
    optimizer.step()
    lpq.checkpoint.save(net, tmp_path / "saved", optimizer)
    expected, kept = net(x).detach(), {name: whole(memory) for name, memory in net.named_buffers()}
    assert any(memory.any() for memory in kept.values())
    for layout in ("alone", "four", "both", "gathered"):
        other, optimizer = made(layout, 1)
        lpq.checkpoint.load(other, tmp_path / "saved", optimizer)
        for name, memory in other.named_buffers():
            assert torch.equal(whole(memory), kept[name]), (layout, name)
        y = other(x).detach()
        assert (y - expected).norm() < 1e-5 * expected.norm(), layout
