"""Which layers take an input, or a gradient of their output, that is encoded already: to the bit as if they had encoded
it. All others refuse it in words, and no layer encodes it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from ranks import fully_shard, mesh_of, on_ranks
from support.comparing import equal
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.distributed import tensor_parallel as tp
from lpq.torch_private.tensors import local_part

IN, OUT, ROWS = 64, 128, 128
RECIPES = (
    "fp8-current", "fp8-delayed", "mxfp8", "nvfp4", "nvfp4()", "x=hybrid(row=nvfp4, col=mxfp8), w=nvfp4, dy=mxfp8",
    "mxfp8-one-copy",
)  # fmt: skip
TABLE = {
    # input or gradient of           fp8-current delayed mxfp8  nvfp4  nvfp4() hybrid one-copy
    ("plain", "x"):                   "taken     history taken  taken  taken   taken  taken",
    ("plain", "dy"):                  "taken     history taken  bits   taken   taken  taken",
    ("FSDP2", "x"):                   "taken     history taken  taken  taken   taken  taken",
    ("FSDP2", "dy"):                  "taken     history taken  bits   taken   taken  taken",
    ("gathered quantized", "x"):      "taken     history taken  taken  taken   taken  taken",
    ("gathered quantized", "dy"):     "taken     history taken  bits   taken   taken  taken",
    ("columns", "x"):                 "taken     history taken  taken  taken   taken  taken",
    ("columns", "dy"):                "ranks     history taken  bits   ranks   taken  taken",
    ("columns, a sequence", "x"):     "ranks     ranks   taken  ranks  ranks   ranks  taken",
    ("columns, a sequence", "dy"):    "ranks     history taken  bits   ranks   taken  taken",
    ("rows", "x"):                    "ranks     ranks   taken  ranks  ranks   ranks  taken",
    ("rows", "dy"):                   "taken     history taken  bits   taken   taken  taken",
    ("rows, into a sequence", "x"):   "ranks     ranks   taken  ranks  ranks   ranks  taken",
    ("rows, into a sequence", "dy"):  "ranks     history taken  bits   ranks   taken  taken",
    ("groups", "x"):                  "groups    none    groups groups groups  groups taken",
    ("groups", "dy"):                 "groups    none    groups groups groups  groups taken",
}  # fmt: skip
LAYER = r"(layer 0, lpq\.nn\.Linear\(64, 128\)|lpq\.nn\.GroupedLinear\(2, 64, 128\)): .*"
WORDS = {
    "history": LAYER + "remembers statistics of .* across steps",
    "bits": LAYER + "rounds gradients with random bits",
    "ranks": LAYER + "amax of .* is of the parts of all ranks together: whether it was reduced .* cannot be told",
    "groups": LAYER + "group of rows otherwise than all|" + LAYER + "groups of rows are not what",
}
REMEDY = {
    "x": "[Pp]ass the (tensor|rows) before",
    "dy": "Return the gradient as it was before, or gradient.dequantize()",
}
Part = Callable[[Tensor, int], Tensor]


def whole(t: Tensor, rank: int) -> Tensor:
    return t


def own_rows(t: Tensor, rank: int) -> Tensor:
    """A rank's rows of each of two sequences."""
    return t.view(2, -1, t.shape[-1]).chunk(2, 1)[rank].contiguous()


def own_features(t: Tensor, rank: int) -> Tensor:
    return t.chunk(2, -1)[rank].contiguous()


class Kind(NamedTuple):
    """How a layer is made, and which parts of its input and of the gradient of its output a rank has."""

    make: Callable[[str], Any]
    x: Part = whole
    dy: Part = whole


def linear(recipe: str, weights: Any = None) -> nn.Module:
    torch.manual_seed(0)
    return lpq.convert(nn.Sequential(nn.Linear(IN, OUT, bias=False)), recipe, weights=weights)


def sharded(weights: Any) -> Kind:
    return Kind(lambda recipe: fully_shard(linear(recipe, weights)))


def parallel(style: Callable[[], Any], x: Part, dy: Part) -> Kind:
    return Kind(lambda recipe: parallelize_module(linear(recipe), mesh_of(), {"0": style()}), x, dy)


class InGroups(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self[0](x, [40, 88])
        return y


def grouped(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    return InGroups(lpq.nn.GroupedLinear(2, IN, OUT, bias=False, recipe=recipe))


KINDS = {
    "plain": Kind(linear),
    "FSDP2": sharded(None),
    "gathered quantized": sharded("high_precision"),
    "columns": parallel(tp.ColwiseParallel, whole, own_features),
    "columns, a sequence": parallel(lambda: tp.ColwiseParallel(input_layouts=Shard(1)), own_rows, own_features),
    "rows": parallel(tp.RowwiseParallel, own_features, whole),
    "rows, into a sequence": parallel(lambda: tp.RowwiseParallel(output_layouts=Shard(1)), own_features, own_rows),
    "groups": Kind(grouped),
}


class Encoded(torch.autograd.Function):
    """Encodes its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Any) -> Tensor:
        ctx.quantizer = quantizer
        return x * 1

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.quantizer.quantize(dy), None


def step(module: Any, x: Tensor, dy: Tensor, encodes: str = "") -> list[Tensor]:
    """This rank's y, dx and dw. ``encodes``: the tensor that is encoded already."""
    module.zero_grad()
    torch.manual_seed(3)
    recipe = module[0].recipe
    x = (recipe.x.quantize(x) if encodes == "x" else x.detach()).requires_grad_()
    y = module(x)
    (Encoded.apply(y, recipe.dy) if encodes == "dy" else y).backward(dy)
    return [y.detach(), local_part(x.grad), local_part(module[0].weight.grad)]


def data(kind: Kind, rank: int, which: str) -> tuple[Tensor, Tensor]:
    """This rank's parts. Tensors have three dimensions where a sequence is divided."""
    torch.manual_seed(1)
    x, dy = torch.randn(ROWS, IN), torch.randn(ROWS, OUT)
    if "sequence" in which:
        x, dy = x.view(2, -1, IN), dy.view(2, -1, OUT)
    return kind.x(x, rank), kind.dy(dy, rank)


@pytest.mark.parametrize("which", KINDS)
@on_ranks(2)
def test_a_tensor_that_is_encoded_already_is_taken_or_refused(rank: int, which: str) -> None:
    kind = KINDS[which]
    x, dy = data(kind, rank, which)
    for i, recipe in enumerate(RECIPES):
        outcomes = {tensor: TABLE[which, tensor].split()[i] for tensor in ("x", "dy")}
        if "none" in outcomes.values():
            with pytest.raises(ValueError, match=r"cannot have the recipe .* no state is kept for each group of rows"):
                kind.make(recipe)
            continue
        module = kind.make(recipe)
        for tensor, outcome in outcomes.items():
            if outcome == "taken":
                expected = step(module, x, dy)
                assert equal(step(module, x, dy, tensor), expected), (recipe, tensor)
                others = (x, -3 * dy) if tensor == "dy" else (-3 * x, dy)
                assert not equal(step(module, *others, tensor), expected), (recipe, tensor)
            else:
                with pytest.raises((ValueError, TypeError), match=f"{WORDS[outcome]}.*{REMEDY[tensor]}"):
                    step(module, x, dy, tensor)
                assert module[0].weight.grad is None


@pytest.mark.starts
@pytest.mark.parametrize("which", ["gathered quantized", "columns, a sequence", "rows"])
@on_ranks(2)
def test_a_compiled_layer_takes_an_input_as_it_is(rank: int, which: str) -> None:
    """A gradient is refused before the layer gets it: ``tests/nn/test_encoded_gradients.py``."""
    kind = KINDS[which]
    x, dy = data(kind, rank, which)
    module = kind.make("mxfp8")
    expected = step(module, x, dy)
    torch._dynamo.reset()
    module[0].compile(fullgraph=True, backend="aot_eager")
    assert equal(step(module, x, dy, "x"), expected)
