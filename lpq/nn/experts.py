"""Experts of Hugging Face's models, which hold the weights of all experts as two stacks: converted as a whole.

transformers has one interface to them (``use_experts_implementation``): a class says whether its weights are
transposed, gated and biased, and the rows of each expert are multiplied one way for all classes. A converted module
goes that way with the products of its recipe. It stays what it is for everybody else: its class is a subclass of its
own one, and its parameters keep their names, shapes and values. Nothing waits for the device.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lpq.distributed.expert_rows import combine, dispatch, encoded_rows, own_experts
from lpq.nn.functional import grouped_linear
from lpq.nn.plan import Plan
from lpq.operations.operands import DTYPES
from lpq.recipes import RecipeError, recipe_sources

if TYPE_CHECKING:
    from lpq.distributed.expert_rows import Dispatch
    from lpq.recipes import Recipe

TOLD = ("num_experts", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")
"""Attributes that the interface gives each module."""
DENSE = (("transformers.models.llama4.modeling_llama4", "Llama4TextExperts"),)
"""Modules and the names of classes in them whose experts are each given rows for all tokens, one expert's behind the
other's; their weights are transposed. They are looked up, not imported."""
UP, DOWN = ("gate_up_proj", "up_proj"), "down_proj"


class Experts(nn.Module):
    """The experts of a mixture, in the class of the module before the conversion. ``class_for`` makes it."""

    base: ClassVar[type[nn.Module]]
    """The class of the module before the conversion."""
    recipe: Recipe | None
    """That of all products; None: the module does what it did before the conversion, or multiplies in high precision
    if ranks share out its experts."""
    dispatched: Dispatch | None = None
    """How rows come from the other ranks if these have some of the experts, as ``lpq.distributed.expert_parallel``
    shares them out; None: all experts are here."""
    routes_tokens: ClassVar[bool] = True
    """It is given tokens, and not rows in groups."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the class before the conversion: no module has this one."""
        return _empty, (self.base,), self.__getstate__()  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the class before the conversion."""
        if self.recipe is None and self.dispatched is None:
            return super().forward(*args, **kwargs)  # of the class beside this one
        return (_dense if is_dense(self) else _routed)(self, *args, **kwargs)


def holds_experts(module: nn.Module) -> bool:
    """Whether the module holds experts that ``adopt_experts`` converts."""
    if isinstance(module, Experts):
        return True
    told = all(hasattr(module, name) for name in TOLD) or is_dense(module)
    return told and "forward" not in vars(module) and all(w.dim() == 3 for w in stacks(module).values())


def is_dense(module: nn.Module) -> bool:
    """Whether its experts are each given rows for all tokens."""
    cls = module.base if isinstance(module, Experts) else type(module)
    return any(cls is getattr(sys.modules.get(where), name, None) for where, name in DENSE)


def stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of the experts by name, each ``[experts, …, …]``."""
    return {name: w for name in (*UP, DOWN) if isinstance(w := getattr(module, name, None), nn.Parameter)}


def check_experts(module: nn.Module, recipe: Recipe, name: str) -> None:
    """Refuse a recipe that the experts cannot have."""
    if Plan.of(recipe).memories:
        raise RecipeError(
            f"{name or 'the layer'} cannot have the recipe {recipe.title}: it remembers statistics across steps, and "
            "none are kept for each expert: use one that measures each tensor"
        )
    for key, weight in stacks(module).items():
        if weight.dtype not in DTYPES:
            raise TypeError(
                f"{name}.{key}: its weights are {weight.dtype}; float32, bfloat16 and float16 can be encoded: cast the "
                "model first, or have the policy give these experts no recipe"
            )


def adopt_experts(module: nn.Module, recipe: Recipe | None) -> Experts:
    """Turn this very module into converted experts: parameters, hooks and references to it stay."""
    if not isinstance(module, Experts):
        base: Any = type(module)
        module.__class__ = class_for(base)
    assert isinstance(module, Experts)
    module.recipe = recipe
    return module


@cache
def class_for(base: Any) -> type[Experts]:
    """The class that modules of the class ``base`` become."""
    made: type[Experts] = type(base.__name__, (Experts, base), {"base": base, "__module__": __name__})
    return made


def _empty(base: Any) -> Experts:
    """Experts that get their state from ``__setstate__``."""
    cls = class_for(base)
    return cls.__new__(cls)


def _routed(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The sum over the experts of each token, ``[tokens, hidden]``, of what they make of it, times their weights.

    An index that is no expert's, as expert parallelism of transformers gives those of other ranks, adds nothing.
    """
    tokens, chosen = top_k_index.shape
    index, order = top_k_index.reshape(-1).sort(stable=True)
    each = torch.arange(experts.num_experts, device=index.device, dtype=index.dtype)
    ends = torch.searchsorted(index, each, right=True, out_int32=True)
    rows = _each(experts, hidden_states[order // chosen], ends)
    weighted = rows * top_k_weights.reshape(-1)[order].unsqueeze(1)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return weighted[back].view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)


def _dense(experts: Any, hidden_states: Tensor) -> Tensor:
    """Rows for each expert in turn, as many for each."""
    count = experts.gate_up_proj.shape[0]
    rows = hidden_states.reshape(-1, experts.hidden_size)
    each = rows.shape[0] // count
    ends = torch.arange(1, count + 1, device=rows.device, dtype=torch.int32) * each
    return _each(experts, rows, ends)


def _each(experts: Any, rows: Tensor, ends: Tensor) -> Tensor:
    """What experts make of their rows, wherever they are."""
    how: Dispatch | None = experts.dispatched
    if how is None:
        return _made(experts, rows, ends)
    name = experts.base.__name__
    quantizer = encoded_rows(name, experts) if how == "encoded" else None
    rows, ends, call = dispatch(rows, ends, getattr(experts, DOWN).device_mesh, quantizer)
    return combine(_made(experts, rows, ends), call, how)


def _made(experts: Any, rows: Tensor, ends: Tensor) -> Tensor:
    """What experts that are here make of their rows."""
    dense = is_dense(experts)
    rows = _multiply(experts, UP[0] if dense or experts.has_gate else UP[1], rows, ends)
    if dense:
        gate, up = rows.chunk(2, dim=-1)
        return _multiply(experts, DOWN, up * experts.act_fn(gate), ends)
    rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    rows = _multiply(experts, DOWN, rows, ends)
    return experts.post_expert_norm(rows) if experts.has_post_expert_norm else rows


def _multiply(experts: Any, name: str, rows: Tensor, ends: Tensor) -> Tensor:
    weight, bias = getattr(experts, name), getattr(experts, f"{name}_bias", None)
    if experts.dispatched is not None:
        weight = own_experts(name, weight)
        bias = None if bias is None else own_experts(name, bias)
    transposed = is_dense(experts) or experts.is_transposed
    recipe = recipe_sources.high_precision() if experts.recipe is None else experts.recipe
    return grouped_linear(rows, weight.transpose(-2, -1) if transposed else weight, ends, recipe, bias)
