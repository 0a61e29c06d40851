"""Experts of Hugging Face's models, which hold the weights of all experts as two stacks: converted as a whole.

transformers has one interface to them (``use_experts_implementation``): a class declares whether its weights are
transposed, gated and biased, and one function multiplies the rows of each expert for all classes. A converted module
takes the place of that function, with the products of its recipe. Its parameters keep their names, shapes and values.
Nothing waits for the device.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lpq.distributed.expert_rows import RowExchange
from lpq.nn.called import Weight
from lpq.nn.extended import Extension
from lpq.nn.fused_mlp import why_changed
from lpq.nn.grouped_linear import GroupedLayer
from lpq.nn.halves import activate
from lpq.nn.plan import LayerBuffer
from lpq.nn.stand_ins import Read
from lpq.operations.source import ACTIVATIONS
from lpq.recipes.gemms import TENSORS
from lpq.tensor import QuantizedTensor

ATTRIBUTES = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated")
"""Attributes that the interface gives each module; newer ones give ``has_post_expert_norm``, too."""
DENSE = (("transformers.models.llama4.modeling_llama4", "Llama4TextExperts"),)
"""Classes, each as a module and a name in it, whose experts each get rows for all tokens, one expert's rows after
another's, and whose weights are transposed. They are looked up, not imported."""
UP, DOWN = ("gate_up_proj", "up_proj"), "down_proj"


class Gate(NamedTuple):
    """How experts compute their activation, as ``lpq.fuse`` has found out."""

    activation: str
    children: dict[str, nn.Module]
    """The modules of the experts, as they were."""
    reads: tuple[Read, ...] = ()
    """The attributes by which it was computed."""


class FusedExperts(Extension, GroupedLayer):
    """The experts of a mixture.

    Static statistics are buffers such as ``gate_up_proj_x_amax``. With ``recipe=None`` it behaves as before the
    conversion, or multiplies in high precision if its experts are divided over ranks.
    """

    dense: ClassVar[bool]
    """Whether each expert is given rows for all tokens."""
    gate: Gate | None = None
    """The activation, which one kernel computes; None: the class before computes it."""
    routes_tokens: ClassVar[bool] = True
    """Whether it is given tokens, and not rows in groups."""
    owners: ClassVar[tuple[str, ...]] = tuple(f"{stack}_{tensor}" for stack in (*UP, DOWN) for tensor in TENSORS)

    def state_buffers(self) -> tuple[LayerBuffer, ...]:
        own = super().state_buffers()
        return tuple(m._replace(name=f"{stack}_{m.name}", stack=stack) for stack in stacks(self) for m in own)

    @classmethod
    def attributes_for(cls, base: Any) -> dict[str, Any]:
        weights = {name: Weight() for name in (*UP, DOWN)}
        return {"dense": _is_dense(base), "kind": base.__name__, **weights}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take the arguments and return the result of the class before the conversion."""
        if self.model.stages is not None:
            self.model.stages.check(self)
        if self.recipe is None and self.dispatched is None:
            return super().forward(*args, **kwargs)  # of the class before the conversion
        return (_dense if self.dense else _routed)(self, *args, **kwargs)


class TransposedExperts(FusedExperts):
    """Experts whose matrices are ``[in, out]``."""

    transposed = True


def holds_experts(module: nn.Module, replaced: bool = False) -> bool:
    """Whether the module holds experts that ``adopt`` converts; ``replaced``: whatever forward its object has."""
    if isinstance(module, FusedExperts):
        return True
    fits = all(hasattr(module, name) for name in ATTRIBUTES) or _is_dense(type(module))
    return fits and (replaced or "forward" not in vars(module)) and all(w.dim() == 3 for w in stacks(module).values())


def _is_dense(base: Any) -> bool:
    return any(base is getattr(sys.modules.get(where), name, None) for where, name in DENSE)


def is_transposed(module: Any) -> bool:
    """Whether its matrices are ``[in, out]``."""
    if isinstance(module, FusedExperts):
        return module.transposed
    return _is_dense(type(module)) or bool(module.is_transposed)


def stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of the experts by name, each ``[experts, …, …]``."""
    return {name: w for name in (*UP, DOWN) if isinstance(w := getattr(module, name, None), nn.Parameter)}


def _routed(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of the results of each token's experts, ``[tokens, hidden]``.

    An index of no expert adds nothing: transformers' expert parallelism has it for experts of other ranks.
    """
    if isinstance(hidden_states, QuantizedTensor) and experts.recipe is not None:
        raise ValueError(
            f"{experts.title}: its tokens are encoded already, as {hidden_states.quantizer}, and it encodes the rows "
            "of each expert, which it sorts first: pass the tokens before they are encoded"
        )
    tokens, chosen = top_k_index.shape
    index, order = top_k_index.reshape(-1).sort(stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    each = torch.arange(experts.num_experts, device=index.device, dtype=index.dtype)
    ends = torch.searchsorted(index, each, right=True, out_int32=True)
    to_experts: Any = Moved.apply
    rows = _over_ranks(experts, to_experts(hidden_states, order // chosen, back, chosen), ends)
    # Weights may be fp32, and make the rows so: these are moved before.
    by_token = to_experts(rows, back, order, 1).view(tokens, chosen, rows.shape[1])
    weighted: Tensor = by_token * top_k_weights.unsqueeze(-1)
    return weighted.sum(1).to(hidden_states.dtype)


class Moved(torch.autograd.Function):
    """Rows in another order, in which each is once, or equally often. Autograd's gradient of an index sorts the index
    and adds row by row, where the inverse order is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, count: int) -> Tensor:
        """``index``: the row that goes to each place; ``back``: the ``count`` places to which the first row went, then
        the places of the second."""
        ctx.save_for_backward(back)
        ctx.count = count
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        each = dy.index_select(0, back)
        return each if ctx.count == 1 else each.view(-1, ctx.count, *dy.shape[1:]).sum(1), None, None, None


def _dense(experts: Any, hidden_states: Tensor) -> Tensor:
    """Return the results for rows that lie expert by expert, equally many for each."""
    count = experts.gate_up_proj.shape[0]
    rows = hidden_states.reshape(-1, experts.hidden_size)
    each = rows.shape[0] // count
    ends = torch.arange(1, count + 1, device=rows.device, dtype=torch.int32) * each
    return _over_ranks(experts, rows, ends)


def _over_ranks(experts: Any, rows: Tensor, ends: Tensor) -> Tensor:
    """Return the results of all experts for their rows; experts may be divided over ranks."""
    exchange = experts.dispatched
    if not isinstance(exchange, RowExchange):  # or the module around them has it
        return _multiply(experts, rows, ends)
    return exchange.combine(_multiply(experts, *exchange.dispatch(rows, ends, experts.down_proj.device_mesh)))


def _multiply(experts: Any, rows: Tensor, ends: Tensor) -> Tensor:
    """Return the results of this rank's experts for their rows."""
    rows = experts.multiply(UP[0] if experts.dense or experts.has_gate else UP[1], rows, ends)
    gate: Gate | None = experts.gate
    if gate is not None and not torch.compiler.is_compiling() and why_as_before(experts) is None:
        rows = activate(rows, ACTIVATIONS[gate.activation])
    else:
        rows = activated(experts, rows)
    rows = experts.multiply(DOWN, rows, ends)
    return experts.post_expert_norm(rows) if getattr(experts, "has_post_expert_norm", False) else rows


def activated(experts: Any, rows: Tensor) -> Tensor:
    """Return what goes into the second product, as the class before computes it."""
    if experts.dense:
        gate, up = rows.chunk(2, dim=-1)
        return up * experts.act_fn(gate)  # type: ignore[no-any-return]
    return experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)  # type: ignore[no-any-return]


def why_as_before(experts: FusedExperts) -> str | None:
    """Why the class before computes the activation; None if a kernel does."""
    if experts.gate is None:
        return "its activation is not act(gate) * up of two halves, with a SiLU, GELU or ReLU"
    if experts.recipe is None:
        return "it has no recipe"
    return why_changed(experts, experts.gate.children, (), experts.gate.reads)
