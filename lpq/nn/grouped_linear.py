"""GroupedLinear: a linear layer for each group of rows, such as the experts of a mixture, in one parameter.

Its results equal, to the bit, the results of a separate ``lpq.nn.Linear`` for each group and its rows. A pass draws
three seeds for each group, in the order of the groups: on a CPU these are the seeds that the separate layers would draw
if they were called one after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lpq import registry
from lpq.distributed.expert_rows import Dispatched, own_experts, own_numbers
from lpq.nn.cached_weight import HeldWeight
from lpq.nn.functional import check_tensors, grouped_linear_of, high_precision, why_not_in_groups
from lpq.nn.input_checks import check_accumulation, check_static
from lpq.nn.linear import Layer
from lpq.nn.observing import watch
from lpq.nn.passes import MOST_CALLS
from lpq.nn.plan import Plan
from lpq.nn.stateful_layer import StatefulLayer
from lpq.operations.offsets import as_offsets
from lpq.recipes import RecipeLike
from lpq.torch_private.compiling import outside_graphs
from lpq.torch_private.tensors import local_part

_outside_graphs = outside_graphs(grouped_linear_of)


class GroupedLayer(StatefulLayer):
    """A layer that multiplies rows in groups, such as the rows of experts, by the matrices of stacks.

    Static statistics are buffers with a value for each group, by its number among the groups of all ranks.
    """

    dispatched: Dispatched | None = None
    """How rows come from the other ranks if these have some of the groups, as ``lpq.distributed.expert_parallel``
    shares them out; None: all groups are here."""

    def why_unfit(self, plan: Plan) -> str | None:
        return why_not_in_groups(plan)

    def place_for(self, memory: Tensor) -> Tensor:
        return memory.new_zeros((next(self.parameters()).shape[0], *memory.shape))

    def own_groups(self) -> slice:
        """Return the numbers of this rank's groups: all, unless ``lpq.distributed.expert_parallel`` divides them over
        ranks."""
        weight = next(self.parameters())
        return slice(0, len(weight)) if self.dispatched is None else own_numbers(weight)

    def multiply(
        self, stack: str, rows: Tensor, offs: Tensor | Sequence[int], held_weight: HeldWeight | None = None
    ) -> Tensor:
        """Multiply the rows of each group of this rank by its matrix of a stack: ``""`` is ``weight``."""
        compiles = torch.compiler.is_dynamo_compiling()
        title = self.sized if compiles else self.title
        title, name, of_bias = (f"{title}.{stack}", stack, f"{stack}_bias") if stack else (title, "weight", "bias")
        own, bias = self._parameters.get(name), getattr(self, of_bias, None)
        weight: Any = getattr(self, name) if own is None else own  # which a hook computes, or a parametrization
        if self.dispatched is not None:
            weight = own_experts(title, weight)
            bias = None if bias is None else own_experts(title, bias)
        if self.transposed:
            weight = weight.transpose(-2, -1)
        check_tensors(title, rows, weight, bias)
        ends = as_offsets(title, offs, weight.shape[0], rows)
        accumulate = self.model.accumulate
        if accumulate is not None:
            check_accumulation(self, weight)
        if compiles or not self.passes.ran:
            self.note_pass(compiles)
        plan = self.passes.plan if self.passes.plan is not None else high_precision()
        states = self._static_of_own_groups(title, stack) if plan.memories else None
        calls = None
        if not compiles:
            epoch, calls = self.passes.calls
            if epoch is not registry.epoch() or len(calls) >= MOST_CALLS:
                calls = self.passes.bound_calls()
        observed = watch(self, stack, self.own_groups().start) if self.passes.observers else None
        # The exchange asks the results how they can take gradients, and results of a graph cannot tell.
        product = _outside_graphs if compiles and self.dispatched and self.dispatched.encoded else grouped_linear_of
        y: Tensor = product(
            title, plan, rows, weight, bias, ends, held_weight=held_weight, accumulate=accumulate, states=states,
            watch=observed, calls=calls,
        )  # fmt: skip
        return y

    def _static_of_own_groups(self, title: str, stack: str) -> dict[str, dict[str, Tensor]]:
        """Return the static statistics of this rank's groups. The statistics of all groups are checked once."""
        if not self.passes.checked and not torch.compiler.is_compiling():
            check_static(self, title)
            self.passes.checked = True
        own = self.own_groups()
        return {t: {k: local_part(v)[own] for k, v in state.items()} for t, state in self.states(stack).items()}


class GroupedLinear(GroupedLayer, Layer):
    """``num_groups`` linear layers: ``y = x Wᵍᵀ + bᵍ`` for the rows of group g.

    ``weight`` is ``[num_groups, out_features, in_features]`` and ``bias``, if there is one, ``[num_groups,
    out_features]``. With ``recipe=None`` it multiplies in high precision.
    """

    kind: ClassVar[str] = "lpq.nn.GroupedLinear"

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: RecipeLike | None,
    ) -> None:
        super().__init__()
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        how: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty((num_groups, out_features, in_features), **how))
        if bias:
            self.bias = nn.Parameter(torch.empty((num_groups, out_features), **how))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        self.begin()
        self.recipe = recipe

    def reset_parameters(self) -> None:
        """Initialize each group as ``nn.Linear`` does."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)

    @property
    def sized(self) -> str:
        return f"{self.kind}({self.num_groups}, {self.in_features}, {self.out_features})"

    def forward(self, input: Tensor, offs: Tensor | Sequence[int]) -> Tensor:  # type: ignore[override]
        """Multiply the rows ``input``, ``[rows, in_features]``, which lie group by group; return
        ``[rows, out_features]``.

        ``offs`` is where each group ends, an int32 tensor ``[num_groups]`` on the device of the input; or it is a list
        of how many rows each group has. Rows behind the last group are zero in the result, and in the gradient of the
        input. On a GPU the host does not wait for ``offs``. The values of a tensor ``offs`` are not checked there.
        """
        if self.model.stages is not None:
            self.model.stages.check(self)
        if self.gather is not None and not torch.compiler.is_compiling():
            self.gather.note()
        held_weight = self.held_weight() if self.passes.held_weight is not None else None
        return self.multiply("", input, offs, held_weight)

    def extra_repr(self) -> str:
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, recipe={self.recipe.title if self.recipe else None}"
        )
