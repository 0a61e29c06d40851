"""The gradients that one run of backward asks a layer for, whether it adds the gradient of the weight to a tensor, and
whether the run moves the states of the layer.

One forward may be followed by several backwards, as in a zero-bubble pipeline, each of which makes the products that it
is asked for. States move once for each forward, in the backward that makes the gradient of the weight. Two kinds of
layers cannot tell a step so, and refuse to be asked for a part of the gradients where they have states that move. A
compiled backward makes all gradients, knows nothing of others, and refuses a graph that is kept for them. The states of
a layer whose weight is frozen move in the first backward, which makes the gradient of the input alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lpq.operations.operators import define
from lpq.operations.states import State
from lpq.torch_private import autograd
from lpq.torch_private.compiling import call_in_place_of, once_when_traced

Accumulate = Literal["grad", "main_grad"]
"""The tensor of a weight to which backward adds its gradient in place."""


def gradients_needed(ctx: Any) -> tuple[bool, bool, bool]:
    """Whether this backward is to make the gradients of x, of the weight and of the bias."""
    needs: tuple[bool, bool, bool] = ctx.needs_input_grad[:3]
    if torch.compiler.is_compiling() or autograd.runs_whole():
        return needs
    nodes = ctx.next_functions  # of the arguments that are tensors: a bias that is None has no place
    x, w, bias = (need and computes(nodes[i][0]) for i, need in enumerate(needs))
    return x, w, bias


def computes(node: Any, returned: bool = True) -> bool:
    """Whether this backward computes the gradient that goes to a node; ``returned``: the answer where
    ``torch.autograd.grad`` returns that gradient, which the node does not accumulate then."""
    try:
        return autograd.will_execute(node)
    except RuntimeError as error:
        if "autograd.grad()" in str(error):
            return returned
        raise


def sum_in_place(weight: Tensor, where: Accumulate) -> Tensor | None:
    """The tensor to which backward adds the gradient of the weight in place; None: there is no ``.grad`` yet, it is
    sparse, as of an embedding with this weight, the weight is computed, and its gradient goes on to what it is computed
    of, or it was frozen since, and autograd drops its gradient."""
    if where == "grad" or not weight.requires_grad:
        so_far = weight.grad if weight.is_leaf and weight.requires_grad else None
        return None if so_far is not None and so_far.is_sparse else so_far
    into: Tensor | None = getattr(weight, "main_grad", None)
    if into is None:
        raise RuntimeError(
            f"a weight of {[*weight.shape]} had a main_grad in forward and has none in backward, which adds to it: "
            "empty it with zero_(), after backward"
        )
    return into


def refuse_parts(states: Mapping[str, State]) -> None:
    """Have a compiled backward, which moves these states each time, refuse to be asked for some gradients alone."""
    _spare_the_dispatcher()
    torch.ops.lpq.refuse_parts(next(memory for state in states.values() for memory in state.values()))


@once_when_traced
def _spare_the_dispatcher() -> None:
    call_in_place_of("lpq::refuse_parts", __name__, "refuse_a_part")


def refuse_part_of(title: str) -> None:
    """Have a backward that moves the states of a frozen layer refuse to be asked for some gradients alone."""
    if not autograd.runs_whole():
        raise _cannot_tell(f"{title}: its weight is frozen, and its recipe", "")


def refuse_a_part(memory: Tensor) -> None:
    """Refuse, in a compiled backward that runs, to be asked for some gradients alone, or by several backwards."""
    if not autograd.runs_whole():
        raise _cannot_tell("a compiled layer whose recipe", "leave the layer uncompiled, or ")
    if autograd.graph_task() != -1 and autograd.keeps_graph():  # else it is traced with its forward, in one graph
        raise RuntimeError(
            "retain_graph=True: a compiled layer whose recipe remembers statistics (delayed scaling) takes each "
            "backward for a step. Leave retain_graph out if no other one follows; else call one on the sum of the "
            "losses, leave the layer uncompiled, or change its recipe"
        )


def _cannot_tell(who: str, remedy: str) -> RuntimeError:
    return RuntimeError(
        f"{who} remembers statistics (delayed scaling), was asked for some gradients alone, by torch.autograd.grad, "
        "inputs= or a pipeline, and cannot tell which backward is a step. Give PipelineStage input_args= and "
        "output_args=, as it infers shapes by such a backward on memory that no data fills. Where steps ask so, as in "
        f"a zero-bubble schedule, {remedy}give it a recipe that remembers nothing"
    )


# Said to write to the state, so that a compiler keeps it.
define("refuse_parts(Tensor(a!) memory) -> ()", refuse_a_part, lambda memory: None)
