"""Layers that are alike share one compiled graph, wherever they stand in a model. torch compiles a function eight times
at most: layers behind the eighth would run uncompiled."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters

import lpq

pytestmark = pytest.mark.usefixtures("no_storm")
WIDTH, BLOCKS = 64, 2


class Block(nn.Module):
    """Two layers, one of which has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Behind(nn.Module):
    """Layers behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.RMSNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(self.norm(x))


class Experts(nn.Module):
    """A layer for rows in two groups."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.both = lpq.nn.GroupedLinear(2, WIDTH, WIDTH, recipe="fp8-current")
        self.both.qualified_name = place

    def forward(self, x: Tensor) -> Tensor:
        return x + self.both(x, torch.tensor([WIDTH // 2, WIDTH], dtype=torch.int32))


def graphs(model: nn.Module, parts: Iterable[nn.Module] = ()) -> int:
    """How many graphs two steps of a model take whose children, or these parts, are compiled one by one."""
    torch.compiler.reset()
    counters.clear()
    for block in parts or model.children():
        block.compile(fullgraph=True, dynamic=False, backend="eager")
    for _ in range(2):
        model(torch.randn(WIDTH, WIDTH, requires_grad=True)).sum().backward()
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_layers_of_one_recipe_share_a_graph(recipe: str) -> None:
    model = lpq.convert(nn.Sequential(*(Block() for _ in range(BLOCKS))), recipe)
    assert len({block.up.qualified_name for block in model}) == BLOCKS
    assert graphs(model) == 1


def test_layers_that_take_what_a_norm_has_encoded_share_a_graph() -> None:
    model = lpq.convert(nn.Sequential(*(Behind() for _ in range(BLOCKS))), "fp8-current", fuse=True)
    assert len(lpq.report(model).fused) == BLOCKS
    assert graphs(model, [behind.block for behind in model]) == 1


def test_layers_for_groups_share_a_graph() -> None:
    assert graphs(nn.Sequential(*(Experts(f"{i}.both") for i in range(BLOCKS)))) == 1


def test_layers_of_two_recipes_have_a_graph_each() -> None:
    model = lpq.convert(nn.Sequential(*(Block() for _ in range(BLOCKS))), "mxfp8")
    model[0].up.recipe = "fp8-current"
    assert graphs(model) == 2


def test_an_error_of_a_layer_that_is_not_compiled_has_its_place() -> None:
    model = lpq.convert(nn.Sequential(Block()), "mxfp8")
    with pytest.raises(ValueError, match=r"layer 0\.up, lpq\.nn\.Linear\(64, 64\): the input is \[1, 3\]"):
        model(torch.zeros(1, 3))


def test_a_storm_of_compilations_is_an_error() -> None:
    """Control of all tests with ``no_storm``."""
    torch.compiler.reset()

    @torch.compile(backend="eager", dynamic=False)
    def double(x: Tensor) -> Tensor:
        return x * 2

    with pytest.raises(FailOnRecompileLimitHit):
        [double(torch.ones(rows)) for rows in range(1, 12)]
    torch.compiler.reset()
