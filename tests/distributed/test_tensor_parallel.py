"""Tensor parallelism, on several ranks: what each multiplies is, bit for bit, what one process multiplies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import mesh_of, on_one, on_ranks
from sharded import whole
from support.small_models import Gated
from support.small_models import gated_plan as plan
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import lpq
from lpq.distributed import tensor_parallel as tp
from lpq.observe import collectives
from lpq.observe.collectives import gathered_bytes

WIDTH, INNER, BATCH, TOKENS = 128, 256, 2, 128


def model(bias: bool = False) -> Gated:
    torch.manual_seed(0)
    return Gated(WIDTH, INNER, bias)


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=draw)
    x[1, TOKENS - 1, 3] = 500.0  # on the last rank only, where the sequence is shared out
    return x, torch.randn(BATCH, TOKENS, WIDTH, generator=draw)


def joined(part: Tensor, dim: int = 1) -> Tensor:
    """A tensor of which each rank has a part."""
    return DTensor.from_local(part, mesh_of(), [Shard(dim)]).full_tensor()


Backward = Callable[[Tensor, Tensor], object]


def steps(net: nn.Module, x: Tensor, dy: Tensor, backward: Backward, factors: Sequence[float]) -> dict[str, Tensor]:
    """Outputs and gradients of inputs of micro-batches, and the summed gradients of parameters."""
    found = {}
    for i, factor in enumerate(factors):
        leaf = (x * factor).requires_grad_()
        y = net(leaf)
        backward(y, dy * factor)
        assert leaf.grad is not None
        found |= {f"y{i}": y.detach(), f"dx{i}": leaf.grad}
    return found | {name: whole(p.grad) for name, p in net.named_parameters() if p.grad is not None}


def run(
    recipe: str,
    sequence: bool,
    bias: bool,
    styles: Any = tp,
    prepare: Callable[[Gated], None] | None = None,
    backward: Backward = Tensor.backward,
    factors: Sequence[float] = (1.0,),
) -> dict[str, Tensor]:
    """Outputs and gradients, over all ranks; ``prepare``: what else is done with the model."""
    net = model(bias)
    assert len(lpq.convert(net, recipe).lpq_conversion.report.converted) == 3
    parallelize_module(net, mesh_of(), plan(sequence, styles))
    if prepare is not None:
        prepare(net)
    x, dy = data()
    if sequence:
        x, dy = (t.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous() for t in (x, dy))
    torch.manual_seed(1)  # of random bits
    found = steps(net, x, dy, backward, factors)
    return {name: joined(t) if sequence and name[-1].isdigit() else t for name, t in found.items()}


def alone(recipe: str, bias: bool, factors: Sequence[float] = (1.0,)) -> dict[str, Tensor]:
    """The same of one process, rank 0."""
    return on_one(_alone, recipe, bias, factors)


def _alone(recipe: str, bias: bool, factors: Sequence[float]) -> dict[str, Tensor]:
    net = lpq.convert(model(bias), recipe)
    torch.manual_seed(1)
    return steps(net, *data(), Tensor.backward, factors)


def agree(found: dict[str, Tensor], expected: dict[str, Tensor], within: float = 1e-5, about: str = "") -> None:
    """To the order of sums."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() < within * tensor.norm(), (about, name)


@pytest.mark.parametrize(
    ("ranks", "sequence", "recipe"),
    [(4, True, "fp8-current"), (4, False, "mxfp8"), (2, False, "fp8-current"), (2, False, "nvfp4-eden")],
)
@on_ranks()
def test_any_number_of_ranks_computes_the_same(rank: int, ranks: int, sequence: bool, recipe: str) -> None:
    """``test_every_recipe`` has two ranks and sequences that are shared out."""
    agree(run(recipe, sequence, True), alone(recipe, True))


@pytest.mark.parametrize(("sequence", "bias"), [(False, True), (True, False)])
@on_ranks(2)
def test_torchs_own_styles_work_on_converted_layers(rank: int, sequence: bool, bias: bool) -> None:
    agree(run("fp8-delayed", sequence, bias, torch_styles), alone("fp8-delayed", bias))


@on_ranks(2)
def test_an_input_may_be_written_to_in_any_way(rank: int) -> None:
    """Between two passes, by means that autograd does not count; and between two siblings, where torch counts no writes
    to tensors that are made under inference mode."""
    net = lpq.convert(model(), "fp8-row")
    parallelize_module(net, mesh_of(), {"left": tp.ColwiseParallel(), "right": tp.ColwiseParallel()})
    memory, layers = data()[0].numpy(), (net.left, net.right)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = torch.from_numpy(memory)
            for layer in layers:
                layer(x)
            memory *= -3
            found = [layer(x) for layer in layers]
            for y, layer in zip(found, layers, strict=True):  # not before, as a copy takes the place of the input
                assert torch.equal(y, layer(x.clone()))
            x = data()[0].clone()
            net.left(x)
            x.mul_(-3)
            assert torch.equal(net.right(x), net.right(x.clone())), mode


@on_ranks(2)
def test_tokens_without_a_batch_in_evaluation_with_a_frozen_layer_under_autocast(rank: int) -> None:
    """Tokens without a batch, in evaluation, with a frozen layer, under autocast; and no tokens."""
    net, whole_net, sequence = model(), model(), Shard(0)
    styles = {
        "left": tp.ColwiseParallel(input_layouts=sequence),
        "right": tp.ColwiseParallel(input_layouts=sequence),
        "down": tp.RowwiseParallel(output_layouts=sequence),
    }
    x = data()[0][0]
    mine = x.chunk(2)[rank].contiguous()
    for made in (net, whole_net):
        lpq.convert(made, "nvfp4-fwd-mxfp8-bwd")
        made.left.weight.requires_grad_(False)
        made.norm = nn.Identity()
    parallelize_module(net, mesh_of(), styles)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode(), torch.autocast("cpu", torch.bfloat16):
            y, expected = net(mine), whole_net(x)
        assert y.dtype == torch.bfloat16
        expected = expected.chunk(2)[rank]
        assert (y - expected).norm() < 1e-2 * expected.norm(), mode
    y.float().square().sum().backward()
    whole_net(x).square().sum().backward()
    assert net.left.weight.grad is None
    for name in ("right", "down"):
        found, wanted = (whole(n.get_submodule(name).weight.grad) for n in (net, whole_net))
        assert (found - wanted).norm() < 5e-2 * wanted.norm(), name
    net.right.weight.grad = None
    net(mine[:0]).sum().backward()
    assert not whole(net.right.weight.grad).any()


@on_ranks(2)
def test_one_plan_serves_a_model_that_is_converted_in_part(rank: int) -> None:
    """A model of which one layer and the embedding are not converted."""

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(64, WIDTH), nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH))

    tokens, found = torch.arange(2 * 32).view(2, 32), []
    for parallel in (False, True):
        net = made()
        lpq.convert(net, {"rules": [{"match": "1", "recipe": "mxfp8"}]})
        if parallel:
            styles = {
                "0": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "1": tp.ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
                "3": tp.RowwiseParallel(output_layouts=Replicate(), use_local_output=False),
            }
            parallelize_module(net, mesh_of(), styles)
            assert isinstance(net[1](net[0](tokens)), DTensor)
        y = net(tokens)
        whole(y.square().mean()).backward()
        found.append(
            {"y": whole(y).detach()} | {n: whole(p.grad) for n, p in net.named_parameters() if p.grad is not None}
        )
    agree(found[1], found[0])


@on_ranks(2)
def test_an_output_that_is_summed_later(rank: int) -> None:
    """An output that ranks have parts of a sum of, which the model sums itself: a bias is added once."""
    found = []
    for parallel in (False, True):
        net = model(bias=True)
        lpq.convert(net, "mxfp8")
        if parallel:
            last = tp.RowwiseParallel(output_layouts=Partial(), use_local_output=False)
            parallelize_module(net, mesh_of(), plan(sequence=False) | {"down": last})
        y = net(data()[0])
        if isinstance(y, DTensor):
            assert y.placements[0].is_partial()
            assert (y.to_local() - y.full_tensor()).norm() > 0.1
        y = whole(y)
        y.square().mean().backward()
        found.append({"y": y.detach()} | {n: whole(p.grad) for n, p in net.named_parameters() if p.grad is not None})
    agree(found[1], found[0])


def _layers(recipe: Any, *sizes: int, weights: Any = None, **styles: Any) -> Any:
    """Layers of these sizes one after the other, with styles for ``_0`` and ``_1``."""
    net = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)))
    lpq.convert(net, recipe, weights=weights)
    return parallelize_module(net, mesh_of(), {name[1:]: style for name, style in styles.items()})


COLUMNS, ROWS = tp.ColwiseParallel(), tp.RowwiseParallel()
DERIVED = "x=fp8, w=fp8, dy=hybrid(row=nvfp4(), col=fp8, col_source=row)"
PREPARED = tp.PrepareInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
REFUSED: list[tuple[dict[str, Any], tuple[int, ...], type[Exception], str]] = [
    # a recipe and styles, with the sizes of layers; the shape of the input; what is said
    ({"sizes": (96, 64), "_0": ROWS}, (64, 48), ValueError,
     "its weight cannot be divided over 2 ranks: shards of 48 columns cut the"),
    ({"sizes": (64, 97), "_0": COLUMNS}, (64, 64), ValueError, "the 97 rows of its weight over 2 ranks are uneven"),
    ({"sizes": (64, 64), "weights": "high_precision", "_0": COLUMNS}, (64, 64), ValueError,
     "not built for weights that tensor parallelism alone shards"),
    ({"sizes": (64, 64), "weights": "quantized", "_0": COLUMNS}, (64, 64), ValueError,
     "not built for weights that tensor parallelism shards: convert"),
    # no dx is wanted: of dy the column operand alone
    ({"recipe": DERIVED, "sizes": (64, 80), "_0": COLUMNS}, (64, 64), ValueError,
     r".*: the gradient .* shards of 40 columns cut the blocks of 16 of nvf"),
    ({"sizes": (64, 64), "_0": tp.ColwiseParallel(input_layouts=Shard(4))}, (2, 64, 64), ValueError,
     "input_layouts=S.*4.* 3 dimen"),
    ({"sizes": (64, 64), "_0": tp.RowwiseParallel(output_layouts=Shard(4))}, (2, 64, 32), ValueError,
     "output_layouts=S.*4.* 3 dim"),
    ({"sizes": (64, 64), "_0": tp.ColwiseParallel(input_layouts=1)}, (), TypeError,  # type: ignore[arg-type]
     "input_layouts=1 is no placement"),
    ({"sizes": (64, 64), "_0": tp.SequenceParallel()}, (2, 64, 64), ValueError, r"its weight lies .* as Replicate\(\)"),
    ({"sizes": (64, 64), "_0": PREPARED}, (2, 64, 64), TypeError,
     "its input is a DTensor, and its weight is not: give the layer a style"),
]  # fmt: skip


@on_ranks(2)
def test_what_cannot_be_shared_out_is_refused_by_the_name_of_the_layer(rank: int) -> None:
    for how, shape, error, words in REFUSED:
        how = {"recipe": "mxfp8", **how}
        with pytest.raises(error, match=f"layer 0, .*{words}"):
            _layers(how.pop("recipe"), *how.pop("sizes"), **how)(torch.ones(shape))
    x = torch.ones(64, 64)
    features = r"all features \(ColwiseParallel\)", r"features of 2 ranks \(RowwiseParallel\)"
    for style, given, least, kind in ((COLUMNS, 64, 32, features[0]), (ROWS, 32, 64, features[1])):
        words = rf"is \[64, {least}\], and for a layer that is given {kind} .* be {96 - least}: take the other style"
        with pytest.raises(ValueError, match=rf"layer 1, .*: the input of this rank {words}"):
            _layers("mxfp8", 64, 64, 64, _0=style, _1=style)(x[:, :given])
    pairs = _layers("mxfp8", 64, 128, _0=COLUMNS)  # each rank has a piece of each half of the rows
    pieces = DTensor.from_local(pairs[0].weight.to_local(), mesh_of(), [_StridedShard(0, split_factor=2)])
    pairs[0].weight = nn.Parameter(pieces)
    with pytest.raises(ValueError, match=r"layer 0, .*: its weight lies .* as _StridedShard\(dim=0, sf=2\), "):
        pairs(x)
    twice, rest = _layers("mxfp8", 64, 64, 64, _0=COLUMNS), "it has a style already: give it only one"
    layouts, expected = twice[0].layouts, twice[0](x)
    for style in (COLUMNS, ROWS, tp.SequenceParallel()):
        with pytest.raises(ValueError, match=rf"^layer 0, lpq\.nn\.Linear\(64, 64\): {rest}"):
            parallelize_module(twice, mesh_of(), {"0": style})
        assert twice[0].layouts is layouts, "the ones of a style that is refused were taken"
        assert torch.equal(twice[0](x), expected)
    norm = parallelize_module(nn.LayerNorm(64), mesh_of(), tp.SequenceParallel())
    with pytest.raises(ValueError, match=f"^LayerNorm: {rest}"):
        parallelize_module(norm, mesh_of(), tp.SequenceParallel())
    static = _layers("x=fp8(static=true), w=fp8, dy=fp8", 64, 64, _0=COLUMNS)
    for value, refused in ((0.0, True), (2.0, False)):
        static[0].x_amax.fill_(value)
        static[0].passes.forget()
        with pytest.raises(RuntimeError, match=r"layer 0, .*its recipe is static") if refused else nullcontext():
            static(x)
    layer = _layers("mxfp8", 64, 64, _0=COLUMNS)
    y = layer(x)
    with pytest.raises(TypeError, match=r"layer 0, .*: the input is torch\.sparse_coo: pass x\.to_dense\(\)"):
        layer(x.to_sparse())
    y.register_hook(lpq.quantizer("mxfp8").quantize)
    words = r"layer 0, .*: the gradient of its output, \[64, 32\], arrived encoded as mxfp8"
    with pytest.raises(TypeError, match=words):
        y.sum().backward()


@on_ranks(2)
def test_a_conversion_after_the_styles_is_refused(rank: int) -> None:
    x, skip = torch.ones(64, 64), {"rules": [{"match": "*", "recipe": "skip"}]}
    late = _layers(skip, 64, 64, _0=COLUMNS)
    for weights in (None, "quantized"):
        words = r"^0: parallelize_module gave .*: build .*, call lpq.convert first and para"
        with pytest.raises(ValueError, match=words):
            lpq.convert(late, "mxfp8", weights=weights)  # type: ignore[arg-type]
    assert type(late[0]) is nn.Linear
    lpq.convert(late, skip)(x)
    late = _layers(skip, 64, 64, _0=torch_styles.ColwiseParallel())
    lpq.convert(late, "mxfp8")(x)
    late[0]._forward_pre_hooks.clear()  # which lay out the input
    with pytest.raises(RuntimeError, match=r"layer 0, .* convert before parallelize_module, with a style of lpq\."):
        late(x)
    words = r"^0: its weight is sharded already; .*tensor parallelism shards it, before par"
    with pytest.raises(ValueError, match=words):
        lpq.convert(late, "mxfp8", weights="high_precision")


def _parts(holder: Any) -> Iterator[Any]:
    """The objects that an object holds as data: attributes, items, and for a function what is bound to it."""
    if isinstance(holder, dict):
        yield from (*holder, *holder.values())
    elif isinstance(holder, list | tuple | set | frozenset):
        yield from holder
    elif isinstance(holder, partial):
        yield from (holder.func, holder.args, holder.keywords)
    elif isinstance(holder, FunctionType | MethodType):
        yield from (cell.cell_contents for cell in getattr(holder, "__closure__", None) or ())
        yield getattr(holder, "__self__", None)
    else:
        yield getattr(holder, "__dict__", None)
        yield from getattr(holder, "next_functions", ())  # of a node of autograd
        yield getattr(holder, "grad_fn", None) if isinstance(holder, Tensor) else None


def held_groups(root: object) -> list[str]:
    """The classes of what holds a process group, among all that an object holds; torch's meshes find theirs."""
    seen, left, found = {}, [root], []
    while left:
        holder = left.pop()
        for held in _parts(holder):
            if isinstance(held, dist.ProcessGroup):
                found.append(type(holder).__name__)
            elif id(held) not in seen and not isinstance(held, type | ModuleType | DeviceMesh | str | int):
                seen[id(held)] = held
                left.append(held)
    return found


@on_ranks(2)
def test_nothing_holds_a_process_group(rank: int, tmp_path: Path) -> None:
    net, mesh = lpq.convert(model(), "fp8-delayed"), mesh_of()
    parallelize_module(net, mesh, plan(sequence=True))
    optimizer = torch.optim.AdamW(net.parameters())
    y = net(data()[0].chunk(2, 1)[rank])
    y.square().mean().backward()
    optimizer.step()
    assert held_groups(net) == held_groups(optimizer) == held_groups(y) == []
    net.down.spare = partial(print, [mesh.get_group()])  # type: ignore[assignment]
    assert held_groups(net) == ["list"]
    del net.down.spare
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"{rank}.pt")
    loaded = torch.load(tmp_path / f"{rank}.pt")
    assert held_groups(loaded) == []
    assert isinstance(loaded["model"]["down.weight"], DTensor)


@on_ranks(2)
def test_the_report_says_what_is_gathered(rank: int) -> None:
    net = model()
    lpq.convert(net, {"rules": [{"match": "left", "recipe": "fp8-block"}, {"match": "*", "recipe": "mxfp8"}]})
    parallelize_module(net, mesh_of(), plan(sequence=True))
    assert [line.strip() for line in str(lpq.report(net)).splitlines() if "parallel" in line] == [
        "parallel  left: outputs over 2 ranks; its input is gathered as fp8(scaling=block): 0.52 of bf16 in forward, "
        "0.52 in backward, where each rank has whole blocks of 128 tokens, else in high precision",
        "parallel  right: outputs over 2 ranks; its input is gathered as mxfp8: 0.52 of bf16 in forward, 0.52 in "
        "backward, where each rank has whole blocks of 32 tokens, else in high precision",
        "parallel  down: inputs over 2 ranks; the gradient of its output is gathered as mxfp8: 1.03 of bf16, where "
        "each rank has whole blocks of 32 tokens, else in high precision",
    ]
    net.left(data()[0].chunk(2, 1)[rank])
    assert lpq.report(net).uncalled == ("right", "down")
    net = model()
    lpq.convert(net, "fprop=mxfp8, dgrad=mxfp8, wgrad=bf16")
    parallelize_module(net, mesh_of(), plan(sequence=True))
    assert (
        "down: inputs over 2 ranks; the gradient of its output is gathered in high precision: the operands that are "
        "wanted together would be 1.52 of that"
    ) in str(lpq.report(net))


@pytest.mark.parametrize(
    ("recipe", "part", "gathers"),
    [  # in backward: one of x, and one of each operand of dy, so that dx is made while the column operand travels
        ("nvfp4", 0.29, 3),
        ("fp8-row", 0.52, 3), ("mxfp8", 0.52, 3),
        # Here the column operand of dy follows from the row operand.
        ("fp8-current", 0.52, 2), ("x=fp8(static=true), w=fp8, dy=fp8", 0.52, 2),
    ],
)  # fmt: skip
@on_ranks(2)
def test_what_is_gathered_are_codes(rank: int, recipe: str, part: float, gathers: int) -> None:
    net = model()
    lpq.convert(net, recipe)
    for layer in (net.left, net.right, net.down):
        for value in layer.static_values().values():
            value.fill_(500.0)
    parallelize_module(net.bfloat16(), mesh_of(), plan(sequence=True))
    x, dy = (t.chunk(2, 1)[rank].bfloat16() for t in data())
    with collectives() as forward:
        y = net(x.requires_grad_())
    with collectives() as backward:
        y.backward(dy)
    high = BATCH * TOKENS * WIDTH * 2
    assert 0 < gathered_bytes(forward) <= part * high  # x of left and right: its row operand, once for both
    assert 0 < gathered_bytes(backward) <= 3 * part * high  # x's column operand, once, and both operands of dy of down
    kinds = [Counter(c.kind for c in seen) for seen in (forward, backward)]
    assert kinds[0]["all_gather"] == 1, kinds
    assert kinds[1]["all_gather"] == gathers, kinds
    assert kinds[0]["reduce_scatter"] == kinds[1]["reduce_scatter"] == 1, kinds  # of dx of left and right: their sum
