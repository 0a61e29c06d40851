"""Fused blocks and norms of which ranks share out the layers are, to the bit, the layers one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import agreed, mesh_of, on_ranks
from sharded import enough
from support.comparing import equal
from support.passes import nodes_of
from support.small_models import LlamaMlp, Normed, shared_out
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.distributed import tensor_parallel as tp

RECIPES = (
    "fp8-current", "fp8-delayed", "fp8-row", "mxfp8", "nvfp4", "nvfp4()", "fprop=mxfp8, dgrad=nvfp4(), wgrad=fp8()",
    "x=hybrid(row=mxfp8, col=fp8, col_source=row), w=mxfp8, dy=fp8",
)  # fmt: skip
BATCH, TOKENS, WIDTH = 2, 128, 64


def plan(sequence: bool, within: str = "") -> dict[str, Any]:
    first = f"{within}gate_proj", f"{within}up_proj"
    return shared_out(first, f"{within}down_proj", 1 if sequence else None)


def mlp(recipe: str | dict[str, Any], sequence: bool, fuse: bool, bias: bool = False) -> Any:
    torch.manual_seed(0)
    net = LlamaMlp(WIDTH)
    if bias:
        net.gate_proj, net.up_proj = nn.Linear(WIDTH, 128), nn.Linear(WIDTH, 128)
        net.down_proj = nn.Linear(128, WIDTH)
    lpq.convert(net, recipe, include="all", fuse=fuse)
    return parallelize_module(net, mesh_of(), plan(sequence))


def part(sequence: bool, step: int) -> tuple[Tensor, Tensor]:
    """This rank's input and gradient of a step."""
    drawn = torch.Generator().manual_seed(step)
    x, dy = (torch.randn(BATCH, TOKENS, WIDTH, generator=drawn) * (1 + step) for _ in range(2))
    x[1, TOKENS - 1, 3] = 100.0  # on the last rank only, where the sequence is shared out
    if sequence:
        x, dy = (t.chunk(2, 1)[dist.get_rank()].contiguous() for t in (x, dy))
    return x, dy


def run(
    net: nn.Module, sequence: bool, dtype: torch.dtype = torch.float32, steps: int = 2
) -> tuple[list[Tensor], set[str]]:
    """Outputs, gradients, over all ranks, and states of some steps; and the functions that autograd had."""
    found, nodes = list[Tensor](), set[str]()
    for step in range(steps):
        net.zero_grad()
        x, dy = (t.to(dtype) for t in part(sequence, step))
        torch.manual_seed(step)  # of random bits
        leaf = x.requires_grad_()
        y = net(leaf * 1.0)
        nodes = nodes_of(y)
        y.backward(dy)
        assert leaf.grad is not None
        grads = [p.grad for p in net.parameters()]
        states = [b.clone() for _, b in net.named_buffers(remove_duplicate=False)]
        found += [y.detach(), leaf.grad]
        found += [t.full_tensor() if isinstance(t, DTensor) else t for t in (*grads, *states) if t is not None]
    return found, nodes


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2)
def test_a_block_is_its_layers(rank: int, recipe: str) -> None:
    """With a bias where the sequence is shared out, and where it is not, for every other recipe."""
    for sequence in (False, True):
        bias = sequence == (RECIPES.index(recipe) % 2 == 0)
        (fused, nodes), (apart, others) = (
            run(mlp(recipe, sequence, fuse, bias), sequence, steps=enough(recipe)) for fuse in (True, False)
        )
        assert "FusedMLPBackward" in nodes
        assert "FusedMLPBackward" not in others
        assert equal(fused, apart), (recipe, sequence)


def rules(gate: str, up: str) -> dict[str, Any]:
    """A policy by which gate and up have recipes of their own."""
    each = {"*gate_proj": gate, "*up_proj": up, "*": "mxfp8"}
    return {"rules": [{"match": match, "recipe": recipe} for match, recipe in each.items()]}


PAIRS = [("fp8-current", "mxfp8"), ("fp8-current", "fp8-delayed"), ("fp8-delayed", "mxfp8")]
"""Both share an encoding with layers beside them; the first does, and the second remembers; the other way round."""


@pytest.mark.parametrize(("gate", "up"), PAIRS)
@on_ranks(2)
def test_a_block_whose_gate_and_up_differ(rank: int, gate: str, up: str) -> None:
    """The gradient of the input is summed over the ranks for each of them, once."""
    for sequence in (False, True):
        (fused, nodes), (apart, _) = (run(mlp(rules(gate, up), sequence, fuse), sequence) for fuse in (True, False))
        assert "FusedMLPBackward" in nodes
        assert equal(fused, apart), sequence


RANDOM = "x=nvfp4(stochastic=true), w=mxfp8, dy=mxfp8"
NORMS = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}


def normed(recipe: str | dict[str, Any], layout: str, fuse: bool, norm: str = "rms") -> Any:
    """A norm and a block: each rank has the whole input of the norm; a part of the sequence, and gets a part of its
    output; or the block gathers what it is given as a DTensor."""
    torch.manual_seed(0)
    net = lpq.convert(Normed(NORMS[norm]).bfloat16(), recipe, include="all")
    if fuse:
        lpq.fuse(net)
    gathers = layout != "whole"
    styles = plan(gathers, "mlp.")
    if gathers:
        styles["norm"] = tp.SequenceParallel(use_local_output=layout == "local")
    if layout == "prepared":
        styles["mlp"] = tp.PrepareInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        for name in ("gate_proj", "up_proj"):
            styles[f"mlp.{name}"] = tp.ColwiseParallel()
    return parallelize_module(net, mesh_of(), styles)


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2)
def test_a_norm_and_a_block_are_their_layers(rank: int, recipe: str) -> None:
    """The kinds of norms take turns: each meets each layout, and each recipe both kinds. Every other recipe meets an
    input that is prepared, which is gathered as one of which each rank has a part."""
    layouts = ("whole", "local", "prepared") if RECIPES.index(recipe) % 4 < 2 else ("whole", "local")
    for i, layout in enumerate(layouts):
        norm = [*NORMS][(i + RECIPES.index(recipe)) % 2]
        net = normed(recipe, layout, True, norm)
        encodes = [entry.name for entry in lpq.report(net).fused]
        assert encodes == ["norm", "mlp"], lpq.report(net).apart
        (fused, nodes), (apart, others) = (
            run(one, layout != "whole", torch.bfloat16, enough(recipe))
            for one in (net, normed(recipe, layout, False, norm))
        )
        assert {"EncodedNormBackward", "FusedMLPBackward"} <= nodes
        assert not {"EncodedNormBackward", "FusedMLPBackward"} & others
        assert equal(fused, apart), (layout, norm)


@pytest.mark.parametrize(("gate", "up"), PAIRS)
@on_ranks(2)
def test_a_norm_before_layers_of_several_formats(rank: int, gate: str, up: str) -> None:
    """It encodes once for each of them. Parts of its output are gathered in each encoding."""
    for i, layout in enumerate(("whole", "local", "prepared")):
        norm = [*NORMS][(i + PAIRS.index((gate, up))) % 2]
        net, other = (normed(rules(gate, up), layout, fuse, norm) for fuse in (True, False))
        notes = {entry.name: entry.note for entry in lpq.report(net).fused}
        assert [*notes] == ["norm", "mlp"], lpq.report(net).apart
        assert "it encodes its output in 2 runs" in notes["norm"]
        (fused, nodes), (apart, _) = (run(one, layout != "whole", torch.bfloat16) for one in (net, other))
        assert {"EncodedNormBackward", "FusedMLPBackward"} <= nodes
        assert equal(fused, apart), (layout, norm)


@on_ranks(2)
def test_a_layer_beside_that_takes_the_output_of_a_norm_in_high_precision(rank: int) -> None:
    """It draws random bits for its input. Where ranks have parts of the output, the norm is computed as before."""
    for layout in ("whole", "local"):
        for pair in (("mxfp8", RANDOM), (RANDOM, "fp8-delayed")):
            net, other = (normed(rules(*pair), layout, fuse) for fuse in (True, False))
            (fused, nodes), (apart, _) = (run(one, layout != "whole", torch.bfloat16) for one in (net, other))
            assert ("EncodedNormBackward" in nodes) == (layout == "whole")
            assert equal(fused, apart), (layout, pair)


@on_ranks(2)
def test_a_frozen_layer_of_an_input_without_a_gradient_skips_no_pass(rank: int) -> None:
    """It has no backward. The layer beside it moves the history that they share, as it moves its own apart."""
    for layout in ("whole", "local"):
        histories = []
        for fuse in (True, False):
            net = normed("fp8-delayed", layout, fuse)
            net.norm.requires_grad_(False)
            net.mlp.up_proj.requires_grad_(False)
            for step in range(2):
                x, dy = (t.bfloat16() for t in part(layout != "whole", step))
                net(x).backward(dy)
            histories.append(net.mlp.gate_proj.x_amax_history)
        histories = [t.full_tensor() if isinstance(t, DTensor) else t for t in histories]
        assert torch.equal(*histories), layout
        assert histories[0].count_nonzero() == 2


def alone() -> Normed:
    torch.manual_seed(0)
    return Normed(nn.RMSNorm).bfloat16()


@on_ranks(2)
def test_what_is_not_fused_says_why(rank: int) -> None:
    x = part(True, 0)[0].bfloat16()

    def styles(norm: Any, column: Any, row: Any = None) -> dict[str, Any]:
        every = {"norm": norm, "mlp.gate_proj": column, "mlp.up_proj": column, "mlp.down_proj": row or ROWS}
        return {name: style for name, style in every.items() if style is not None}

    sequence, gathers = Shard(1), tp.ColwiseParallel(input_layouts=Shard(1))
    own, torchs = tp.SequenceParallel(use_local_output=True), torch_styles.SequenceParallel(use_local_output=True)
    for name, recipe, plan, words in (
        ("norm", "mxfp8", styles(torchs, gathers), "a forward hook looks at its output"),
        ("norm", "x=nvfp4(), w=mxfp8, dy=identity", styles(own, gathers), None),
        ("norm", "x=identity, w=mxfp8, dy=mxfp8", styles(own, gathers), "makes of each input an encoding of its own"),
        ("norm", "mxfp8", {"mlp.gate_proj": gathers, "mlp.up_proj": tp.ColwiseParallel()}, "in different layouts"),
        ("norm", rules("mxfp8", RANDOM), styles(own, gathers), "something takes it in high precision, too"),
        ("mlp", "mxfp8", {"mlp.gate_proj": tp.ColwiseParallel()}, "ranks share out some of its weights"),
        ("mlp", "mxfp8", styles(None, tp.ColwiseParallel(output_layouts=Replicate()), None), "otherwise than"),
    ):
        net = parallelize_module(lpq.convert(alone(), recipe, include="all", fuse=True), mesh_of(), plan)
        apart = {entry.name: entry.note for entry in lpq.report(net).apart}
        assert (name in apart) == (words is not None), (name, apart)
        assert words is None or words in apart[name], (words, apart)
    # Of so few tokens parts cut blocks: they are gathered in high precision, and the norm does not encode.
    nets = [normed("mxfp8", "local", fuse) for fuse in (True, False)]
    short = [net(x[:, :8].contiguous()) for net in nets]
    assert "EncodedNormBackward" not in nodes_of(short[0])
    assert equal(*short)
    assert sequence == gathers.input_layouts[0]


ROWS = tp.RowwiseParallel(output_layouts=Shard(1))


@on_ranks(2)
def test_a_rank_alone_that_is_not_fused_is_told(rank: int) -> None:
    net = mlp("mxfp8", False, fuse=True)
    x, _ = part(False, 0)
    handle = net.up_proj.register_forward_hook(lambda *_: None) if rank else None
    for said in agreed(lambda: net(x), RuntimeError):
        assert "in a fused block" in said, said
    if handle is not None:
        handle.remove()
    net(x).sum().backward()


@pytest.mark.starts
@pytest.mark.parametrize("part", ["mlp", "mlp.gate_proj"])
@on_ranks(2)
def test_compiled_layers_that_remember_encode_by_themselves(rank: int, part: str) -> None:
    """The norm before them is not compiled, and hands them an ordinary tensor. A block that is one function calls its
    gate past compiled code, and gets what it encodes itself."""
    found = []
    for fuse in (False, True):
        net = normed("fp8-delayed", "local", fuse)
        if fuse:
            net.get_submodule(part).compile(fullgraph=True, backend="eager")
        found.append(run(net, True, torch.bfloat16, 3)[0])
    assert equal(*found)
    assert ("is compiled and remembers statistics of inputs" in str(lpq.report(net))) == (part == "mlp")


@pytest.mark.starts
@on_ranks(2)
def test_compiled_code_computes_the_same_layer_by_layer(rank: int) -> None:
    found = []
    for fuse in (False, True):
        torch._dynamo.reset()
        net = normed("fp8-row", "local", fuse)
        net.compile(backend="eager")  # others have one node for the whole graph
        tensors, nodes = run(net, True, torch.bfloat16, 1)
        found.append(tensors)
    assert "SiluBackward0" in nodes, nodes  # a block that is one function has none
    assert equal(*found)
