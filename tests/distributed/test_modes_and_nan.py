"""Weights and experts that ranks share out: a dispatch mode around backward, backward in parts, and a NaN on one rank.

In a mode backward calls operators of the dispatcher, and asked for some gradients it makes fewer products: it must
reduce over the ranks all the same. A recipe of each kind is tried in a mode and compiled. Compiled are tensor
parallelism in ``test_parallel_combined``, and experts in ``test_expert_parallel``. FSDP2 has both, and a NaN, in
``test_units``. The kit puts a NaN into a part of every format, however it is cut.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_expert_parallel as experts
import test_tensor_parallel as parallel
import torch
from ranks import on_ranks
from sharded import W8, whole
from support.modes import Watched
from torch import Tensor, nn

from lpq.operations import reduce_statistics

NAN = float("nan")
HYBRID = W8.format("hybrid(row=nvfp4, col=mxfp8, col_source=row)")


def watched(y: Tensor, dy: Tensor) -> None:
    """Run backward in a mode."""
    with Watched():
        y.backward(dy)


def in_parts(y: Tensor, dy: Tensor) -> None:
    """Ask for the gradient of the input first, and then for the gradients of all weights, twice: no layer remembers
    another step for the second time."""
    nodes, leaves = [y.grad_fn], []
    for node in nodes:  # grows while it is walked
        if node is not None:
            leaves += [node.variable] if hasattr(node, "variable") else []
            nodes += [before for before, _ in node.next_functions if before not in nodes]
    inputs = [leaf for leaf in leaves if not isinstance(leaf, nn.Parameter)]
    assert len(inputs) == 1
    y.backward(dy, retain_graph=True, inputs=inputs)
    others = [leaf for leaf in leaves if leaf is not inputs[0]]
    y.backward(dy, retain_graph=True, inputs=others)
    torch.autograd.grad(y, others, dy)


def changed(recipe: str, sequence: bool, backward: Callable[[Tensor, Tensor], object]) -> list[str]:
    """The results of two micro-batches that differ from those whose backward nothing watches, and what layers remember
    then."""
    nets: list[nn.Module] = []
    usual, found = (
        parallel.run(recipe, sequence, True, prepare=nets.append, backward=how, factors=(1.0, -3.0))
        for how in (Tensor.backward, backward)
    )
    for results, net in zip((usual, found), nets, strict=True):
        results |= {name: whole(memory) for name, memory in net.named_buffers()}
    assert usual.keys() == found.keys()
    return [name for name, tensor in usual.items() if not torch.equal(tensor, found[name])]


def alone_on_each_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reduce_statistics, "reduce_max", lambda values, group: list(values))


@pytest.mark.parametrize(
    ("recipe", "turn"),
    [("fp8-current", False), ("fp8-current", True), ("fp8-delayed", True), ("fp8-row", False), ("nvfp4", True),
     ("mxfp8", False), (HYBRID, True)],
)  # fmt: skip
@on_ranks(2)
def test_a_mode_around_backward_and_parts_of_it_change_nothing(rank: int, recipe: str, turn: bool) -> None:
    """Each backward of each recipe, with a sequence that is shared out and without for every other recipe."""
    for sequence, backward in zip((turn, not turn), (watched, in_parts), strict=True):
        assert changed(recipe, sequence, backward) == [], (sequence, backward)


@on_ranks(2)
def test_a_backward_that_reduces_nothing_is_noticed(rank: int) -> None:
    def watched_alone(y: Tensor, dy: Tensor) -> None:
        with pytest.MonkeyPatch.context() as patch:
            alone_on_each_rank(patch)
            watched(y, dy)

    for sequence in (False, True):
        assert "left.weight" in changed("fp8-current", sequence, watched_alone)


@pytest.mark.parametrize(("recipe", "dispatch"), experts.FAMILIES)
@on_ranks(2)
def test_experts_with_a_mode_around_backward_and_a_nan_on_one_rank(rank: int, recipe: str, dispatch: str) -> None:
    """With biases in the recipes that have a format's own name."""
    rows, bias = experts.rows, "=" not in recipe

    def spoiled_rows(of: int) -> tuple[Tensor, Tensor, Tensor]:
        x, dy, ends = rows(of)
        if of == 1:
            x[0, 3] = dy[-experts.BEHIND - 1, 5] = NAN
        return x, dy, ends

    for made in (rows, spoiled_rows):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts, "rows", made)
            experts.as_one(rank, 2, recipe, "cpu", bias, dispatch, watched)
