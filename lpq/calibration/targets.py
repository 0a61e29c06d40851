"""The layers that are calibrated: which statistics of their inputs and weights become static."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lpq import registry
from lpq.calibration.errors import CalibrationError
from lpq.calibration.stacks import ONLY, matrix_of, stacks_in
from lpq.checkpoint.model import PREFIX, Model
from lpq.checkpoint.tensors import whole
from lpq.distributed.shard import plain
from lpq.engines.models import gathered_dtypes
from lpq.formats import Quantizer
from lpq.nn import Layer
from lpq.nn.experts import Experts
from lpq.nn.grouped_linear import GroupedLinear
from lpq.nn.remembering import Remembering
from lpq.operations.measuring import measure
from lpq.operations.operands import as_matrix
from lpq.recipes import Recipe
from lpq.recipes.gemms import OPERANDS
from lpq.tensor import QuantizedTensor
from lpq.torch_private.tensors import local_part

CALIBRATED = ("x", "w")
"""The tensors that get static statistics: those of gradients are measured as ever."""


@dataclass(frozen=True)
class Target:
    """A layer, and the recipe that it gets."""

    name: str
    layer: Layer | Experts
    recipe: Recipe
    """The static recipe."""
    dynamic: Recipe
    """The recipe that measures everything, under which statistics are collected."""
    weight: Tensor | None
    """Whole or sharded, in high precision; None: its statistics do not become static."""
    dtype: torch.dtype | None
    """The dtype in which the weight is encoded."""
    stack: str = ONLY
    expert: int | None = None
    """The number of the expert in a stack of the layer; None: the whole layer."""

    @property
    def x(self) -> Quantizer:
        """The static quantizer of the input."""
        return self.recipe.x

    @property
    def w(self) -> Quantizer:
        """The static quantizer of the weight."""
        return self.recipe.w

    def names(self, tensor: str) -> list[str]:
        """The names of the static statistics of the input, ``x``, or of the weight, ``w``."""
        keys = [
            prefix + buffer.name
            for prefix, branch in getattr(self, tensor).state_branches().items()
            if branch.static
            for buffer in branch.state
        ]
        return [f"{self.name}.{tensor}_{key}" for key in keys]

    def measured_input(self, x: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The statistics of an input, by name."""
        return self._measured("x", as_matrix(x), x.dtype)

    def measured_weight(self) -> Iterator[tuple[str, Tensor]]:
        """The statistics of this rank's part of the weight, by name. Where its shards cut blocks it is gathered."""
        if self.weight is None or not (names := self.names("w")):
            return
        if self.expert is None:
            matrix: Tensor | None = _matrix(self.weight, self.layer, self.w)
        else:
            matrix = matrix_of(self.weight, self.layer, self.expert)
        if matrix is not None:
            yield from self._measured("w", matrix, self.dtype or self.weight.dtype)
        else:  # another rank has it
            yield from ((name, torch.zeros((), device=local_part(self.weight).device)) for name in names)

    def places(self) -> dict[str, Tensor]:
        """The static values of the layer by the names of statistics, to write to."""
        found = {name: local_part(value) for name, value in self.layer.static_values().items()}
        if self.expert is None:
            return {f"{self.name}.{key}": value for key, value in found.items()}
        begin = f"{self.stack}_" if self.stack else ""
        own = {key.removeprefix(begin): value for key, value in found.items() if key.startswith(begin)}
        return {f"{self.name}.{key}": value[self.expert] for key, value in own.items()}

    def _measured(self, tensor: str, x: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        quantizer: Quantizer = getattr(self, tensor)
        for prefix, branch in quantizer.state_branches().items():
            if not (branch.static and branch.state):
                continue
            sides = (None, branch) if prefix == "col_" else (branch, None)
            for stat, value in zip(branch.stats, measure(x, *sides, dtype=dtype), strict=True):
                if stat.of_all:
                    yield f"{self.name}.{tensor}_{prefix}{stat.name}", value


def targets(model: nn.Module, search: str | None) -> list[Target]:
    """The layers of a converted model that have something to make static."""
    seen = Model(model)
    state, _ = seen.state()
    dtypes = gathered_dtypes(seen.module)
    found: dict[int, Target] = {}
    for name, layer in seen.layers():
        if layer.recipe is None or id(layer) in found or isinstance(layer, GroupedLinear):
            continue
        _check_schedule(name, layer)
        weight = state.get(f"{PREFIX}{name}.weight", layer.weight)
        stored = isinstance(local_part(weight), QuantizedTensor)
        made = _static(layer.recipe, search, weights=not stored)
        target = Target(name, layer, made, _dynamic(layer.recipe), None if stored else weight, dtypes.get(id(layer)))
        if made != layer.recipe or target.names("x") or target.names("w"):
            found[id(layer)] = target
    return [*found.values(), *_of_experts(seen, state, search)]


def forgotten(model: nn.Module) -> str:
    """The formats that have a scale of a whole tensor which could become static, and lack the option for it, in words;
    empty if there are none."""
    found: dict[str, str] = {}
    for recipe in (layer.recipe for _, layer in Model(model).layers() if layer.recipe is not None):
        for operand, quantizer in recipe.operands.items():
            side = quantizer.side(operand.side)
            options = {field.name for field in fields(side)}  # type: ignore[arg-type]
            if operand.tensor in CALIBRATED and "static" not in options:
                stats = [stat.name for stat in side.stats if stat.of_all and stat.reduce == "max"]
                if stats and all(stat.round == 1 for stat in side.stats):
                    found[registry.format_of(type(side)).name] = stats[0]
    return "; ".join(
        f"format {name} measures {stat!r} of the whole tensor at each step, since its quantizer has no option "
        "static: bool = False: with that, and nothing else, the statistic can become static"
        for name, stat in found.items()
    )


def _of_experts(seen: Model, state: Mapping[str, Tensor], search: str | None) -> Iterator[Target]:
    """A target for each expert of a stack."""
    dtypes = gathered_dtypes(seen.module)
    for holder, key, names, path in stacks_in(seen.module):
        assert holder.recipe is not None
        _check_schedule(path.rpartition(".")[0], holder)
        weight = state[f"{PREFIX}{path}"]
        stored = isinstance(local_part(weight), QuantizedTensor)
        made = _static(holder.recipe, search, weights=not stored)
        for number, name in enumerate(names):
            target = Target(
                name, holder, made, _dynamic(holder.recipe), None if stored else weight, dtypes.get(id(holder)),
                key, number,
            )  # fmt: skip
            if made != holder.recipe or target.names("x") or target.names("w"):
                yield target


def _check_schedule(name: str, layer: Remembering) -> None:
    if layer.schedule is not None and len(layer.schedule.pieces) > 1:
        raise CalibrationError(
            f"{name}: its recipe changes by step, {layer.schedule}, and static scales are of one recipe: convert the "
            "model to the last one first"
        )


def _dynamic(recipe: Recipe) -> Recipe:
    """The recipe that measures everything."""
    return _with(recipe, lambda quantizer, _: quantizer.frozen(static=False))


def searches(target: Target) -> bool:
    """Whether scales of its weight are searched."""
    return target.dynamic.w.frozen() != target.w and target.weight is not None


def _static(recipe: Recipe, search: str | None, *, weights: bool) -> Recipe:
    def frozen(quantizer: Quantizer, tensor: str) -> Quantizer:
        if tensor == "w":
            return quantizer.frozen(search) if weights else quantizer
        return quantizer.frozen()

    return _with(recipe, frozen)


def _with(recipe: Recipe, change: Callable[[Quantizer, str], Quantizer]) -> Recipe:
    """The recipe with other quantizers of inputs and weights."""
    gemms: dict[str, Any] = {}
    for first, second in zip(OPERANDS[::2], OPERANDS[1::2], strict=True):
        a, b = (
            change(recipe.operands[operand], operand.tensor)
            if operand.tensor in CALIBRATED
            else recipe.operands[operand]
            for operand in (first, second)
        )
        gemms[first.gemm] = replace(recipe.gemm(first.gemm), a=a, b=b)
    made = replace(recipe, name=None, **gemms)
    return recipe if made == recipe else made


def _matrix(weight: Tensor, layer: Any, quantizer: Quantizer) -> Tensor:
    """This rank's part of a weight as a matrix, or all of it where parts have statistics of their own."""
    if isinstance(weight, DTensor) and (layer.transposed or _is_cut(weight, quantizer)):
        found = whole(weight)
    else:
        found = plain(local_part(weight.detach()))
    return as_matrix(found.t() if layer.transposed else found)


def _is_cut(weight: DTensor, quantizer: Quantizer) -> bool:
    """Whether shards cut the parts in which an operand is measured; the answer is the same on all ranks."""
    ranks = [1, 1]  # that share out its rows, and its columns
    for placement, size in zip(weight.placements, weight.device_mesh.shape, strict=True):
        if isinstance(placement, Replicate) or size == 1:
            continue
        if not isinstance(placement, Shard) or placement.dim > 1:
            return True
        ranks[placement.dim] *= size
    for cut, size in enumerate(ranks):
        each = math.ceil(weight.shape[cut] / size)
        for side, dim in ((quantizer.side("row"), cut), (quantizer.side("col"), 1 - cut)) if size > 1 else ():
            units = [buffer.unit(dim) for buffer in side.layout]
            if side.why_no_parts(dim) is not None or any(unit is not None and each % unit for unit in units):
                return True
    return False
