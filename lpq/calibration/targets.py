"""The layers that are calibrated: which statistics of their inputs and weights become static."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lpq import registry
from lpq.calibration.errors import CalibrationError
from lpq.checkpoint.model import PREFIX, Model
from lpq.checkpoint.tensors import chunk, whole
from lpq.distributed.shard import plain
from lpq.engines.models import gathered_dtypes
from lpq.formats import Quantizer
from lpq.nn import Layer
from lpq.nn.expert_stacks import expert_stacks
from lpq.nn.grouped_linear import GroupedLinear
from lpq.nn.names import plain_name
from lpq.nn.stateful_layer import StatefulLayer
from lpq.operations.inputs import as_matrix
from lpq.operations.measuring import measure
from lpq.recipes import Recipe
from lpq.recipes.gemms import OPERANDS
from lpq.tensor import QuantizedTensor
from lpq.torch_private.tensors import local_part

CALIBRATED = ("x", "w")
"""The tensors that get static statistics; statistics of gradients are still measured."""


@dataclass(frozen=True)
class Target:
    """A layer, and the recipe that it gets."""

    name: str
    layer: StatefulLayer
    recipe: Recipe
    """The static recipe."""
    dynamic: Recipe
    """The recipe that measures everything, under which statistics are collected."""
    weight: Tensor | None
    """Whole or sharded, in high precision; None: its statistics do not become static."""
    dtype: torch.dtype | None
    """The dtype in which the weight is encoded."""
    stack: str = ""
    expert: int | None = None
    """The number of the expert in a stack of the layer; None: the whole layer."""

    def names(self, tensor: str) -> list[str]:
        """The names of the static statistics of the input, ``x``, or of the weight, ``w``."""
        branches = getattr(self.recipe, tensor).state_branches()
        keys = [prefix + buffer.name for prefix, branch in branches.items() if branch.static for buffer in branch.state]
        return [f"{self.name}.{tensor}_{key}" for key in keys]

    def measured_input(self, x: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The statistics of an input, by name."""
        return self._measured("x", as_matrix(x), x.dtype)

    def measured_weight(self) -> Iterator[tuple[str, Tensor]]:
        """The statistics of the weight, by name. It is gathered, unless it is an expert's, which is on one rank."""
        if self.weight is None or not (names := self.names("w")):
            return
        matrix = whole(self.weight) if self.expert is None else _own_matrix(self.weight, self.expert)
        if matrix is not None:
            matrix = as_matrix(matrix.t() if self.layer.transposed else matrix)
            yield from self._measured("w", matrix, self.dtype or self.weight.dtype)
        else:  # another rank has it
            device = local_part(self.weight).device
            yield from ((name, torch.zeros((), dtype=torch.float32, device=device)) for name in names)

    def places(self) -> dict[str, Tensor]:
        """The static values of the layer by the names of statistics, to write to."""
        own = [m for m in self.layer.state_buffers() if not m.moves and m.stack == self.stack]
        values = {f"{self.name}.{m.tensor}_{m.key}": local_part(getattr(self.layer, m.name)) for m in own}
        return values if self.expert is None else {name: value[self.expert] for name, value in values.items()}

    def _measured(self, tensor: str, x: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        quantizer: Quantizer = getattr(self.recipe, tensor)
        for prefix, branch in quantizer.state_branches().items():
            if not (branch.static and branch.state):
                continue
            sides = (None, branch) if prefix == "col_" else (branch, None)
            for stat, value in zip(branch.stats, measure(x, *sides, dtype=dtype), strict=True):
                if stat.of_all:
                    yield f"{self.name}.{tensor}_{prefix}{stat.name}", value


class Place(NamedTuple):
    """A layer with a recipe, or an expert of a stack with one."""

    name: str
    layer: StatefulLayer
    weight: str
    """The name of its weight, or of the stack."""
    stack: str = ""
    """The name of the stack in a layer that has several."""
    expert: int | None = None
    """The number of the expert; None: the whole layer."""


def _own_matrix(weight: Tensor, expert: int) -> Tensor | None:
    """The matrix of an expert; None if this rank does not hold it."""
    first, last, _ = chunk(weight)[0].indices(len(weight))
    return plain(local_part(weight.detach()))[expert - first] if first <= expert < last else None


def places(model: Model) -> Iterator[Place]:
    """Yield the layers with a recipe of a model, each once, and of grouped layers each expert."""
    for own, layer in model.module.named_modules():
        if isinstance(layer, Layer) and not isinstance(layer, GroupedLinear) and layer.recipe is not None:
            yield Place(name := plain_name(own), layer, f"{name}.weight".lstrip("."))
    for stack in expert_stacks(model.module):
        for number, name in enumerate(stack.layers if stack.recipe is not None else ()):
            yield Place(name, stack.holder, stack.name, stack.key, number)


def targets(model: nn.Module, search: str | None) -> list[Target]:
    """The layers of a converted model that have something to make static; each expert of a stack counts as one."""
    view = Model(model)
    state, _ = view.state()
    dtypes = gathered_dtypes(view.module)
    result: list[Target] = []

    @cache  # many layers have the same quantizers, and each new one is checked
    def frozen(quantizer: Quantizer, search: str | None, static: bool) -> Quantizer:
        return quantizer.frozen(search, static=static)

    for name, layer, path, stack, expert in places(view):
        recipe: Any = layer.recipe
        if layer.schedule is not None and len(layer.schedule.pieces) > 1:
            raise CalibrationError(
                f"{name if expert is None else path.rpartition('.')[0]}: its recipe changes by step, {layer.schedule}, "
                "and static scales are of one recipe: convert the model to the last one first"
            )
        weight: Any = state[key] if (key := f"{PREFIX}{path}") in state else layer.weight  # which is computed
        stored = isinstance(local_part(weight), QuantizedTensor)
        static = _static(recipe, search, frozen, weights=not stored)
        of_weight = None if stored else weight
        dynamic = _with(recipe, lambda quantizer, _: frozen(quantizer, None, False))
        target = Target(name, layer, static, dynamic, of_weight, dtypes.get(id(layer)), stack, expert)
        if static != recipe or target.names("x") or target.names("w"):
            result.append(target)
    return result


def forgotten(model: nn.Module) -> str:
    """The formats that have a scale of a whole tensor which could become static, and lack the option for it, in words;
    empty if there are none."""
    stats_by_format: dict[str, str] = {}
    for recipe in (layer.recipe for _, layer in Model(model).layers() if layer.recipe is not None):
        for operand, quantizer in recipe.operands.items():
            side = quantizer.side(operand.side)
            options = {field.name for field in fields(side)}  # type: ignore[arg-type]
            if operand.tensor in CALIBRATED and "static" not in options:
                stats = [stat.name for stat in side.stats if stat.of_all and stat.reduce == "max"]
                if stats and all(stat.round == 1 for stat in side.stats):
                    stats_by_format[registry.format_of(type(side)).name] = stats[0]
    return "; ".join(
        f"format {name} measures {stat!r} of the whole tensor at each step, since its quantizer has no option "
        "static: bool = False: with that, and nothing else, the statistic can become static"
        for name, stat in stats_by_format.items()
    )


def searches(target: Target, search: str) -> bool:
    """Whether scales of its weight are searched, as by its recipe or from now on."""
    w = target.recipe.w
    return target.weight is not None and (w.side("row").searched_by(search) or w.side("col").searched_by(search))


def _static(
    recipe: Recipe, search: str | None, frozen: Callable[[Quantizer, str | None, bool], Quantizer], *, weights: bool
) -> Recipe:
    def change(quantizer: Quantizer, tensor: str) -> Quantizer:
        if tensor == "w":
            return frozen(quantizer, search, True) if weights else quantizer
        return frozen(quantizer, None, True)

    return _with(recipe, change)


def _with(recipe: Recipe, change: Callable[[Quantizer, str], Quantizer]) -> Recipe:
    """The recipe with other quantizers of inputs and weights."""
    changed = {o: change(q, o.tensor) if o.tensor in CALIBRATED else q for o, q in recipe.operands.items()}
    gemms: dict[str, Any] = {}
    for a, b in zip(OPERANDS[::2], OPERANDS[1::2], strict=True):
        gemms[a.gemm] = replace(recipe.gemm(a.gemm), a=changed[a], b=changed[b])
    other = replace(recipe, name=None, **gemms)
    return recipe if other == recipe else other
