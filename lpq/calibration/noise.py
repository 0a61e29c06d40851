"""The noise of formats in the output of each layer: its signal-to-noise ratio, in dB."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpq.calibration.collecting import Forward, evaluating, through
from lpq.calibration.errors import CalibrationError
from lpq.calibration.stacks import ONLY, Stack, stacks_in, weight_of
from lpq.checkpoint.model import Model
from lpq.distributed.shard import plain
from lpq.engines.experts import states_of
from lpq.formats import Quantizer
from lpq.nn import GroupedLinear, Layer
from lpq.nn.experts import Experts, is_transposed
from lpq.nn.observing import observing
from lpq.operations.decoding import decode
from lpq.operations.operands import as_matrix, encode_operands
from lpq.tensor import QuantizedTensor
from lpq.tensor.observed import Observed

Sums = dict[str, list[float]]
"""The squares of outputs and of their noise, by the name of the layer."""


class Noise(NamedTuple):
    """The noise of one layer."""

    layer: str
    output: float
    """The ratio of its output to the change by its formats, in dB: 6 dB are a bit. Infinite where nothing changes."""
    weight: float
    """The ratio for the weight alone, as forward multiplies it; NaN where it is stored quantized."""


@torch.no_grad()
def layer_noise(model: nn.Module, batches: Iterable[Any], *, forward: Forward = through) -> list[Noise]:
    """The noise of each layer with a recipe, the noisiest first, on batches that go through the model.

    A layer's output is compared with the product in fp32 of the same input, which is noisy itself where layers before
    it are. It is for models that are not sharded.
    """
    sums: dict[str, list[float]] = {}
    with_recipe = {name: layer for name, layer in Model(model).layers() if layer.recipe is not None}
    layers = {name: layer for name, layer in with_recipe.items() if not isinstance(layer, GroupedLinear)}
    stacks = {stack.weight.removesuffix(".weight"): stack for stack in stacks_in(model)}
    weights = {name: layer.weight for name, layer in layers.items()}
    weights |= {name: weight_of(stack) for name, stack in stacks.items()}
    for name, weight in weights.items():
        if hasattr(weight, "device_mesh"):
            raise CalibrationError(f"{name} is sharded: measure the noise of the model before it is")
    if not weights:
        raise CalibrationError("no layer has a recipe, whose noise could be measured: convert the model, lpq.convert")
    names = {(id(layer), ONLY): name for name, layer in layers.items()}
    names |= {(id(stack.holder), stack.key): name for name, stack in stacks.items()}
    watched = [*layers.values(), *(stack.holder for stack in stacks.values())]
    with observing(watched, _Comparing(names, sums)), evaluating(model):
        for batch in batches:
            forward(model, batch)
    if not sums:
        raise CalibrationError("no batch went through a layer with a recipe: pass what the model is called with")
    of_weight = {name: partial(_of_weight, layer) for name, layer in layers.items()}
    of_weight |= {name: partial(_of_stack, stack) for name, stack in stacks.items()}
    found = [Noise(name, _decibels(*total), of_weight[name]()) for name, total in sums.items()]
    return sorted(found, key=lambda noise: (noise.output, noise.layer))


class _Comparing:
    """Compares each output with the product in high precision of the same input."""

    def __init__(self, names: Mapping[tuple[int, str], str], sums: Sums) -> None:
        """``names``: of each layer or stack, by the ``id`` of its module and its name in that."""
        self._names, self._sums = names, sums
        self._seen: dict[str, Observed] = {}

    def observe(self, seen: Observed) -> None:
        """Take the tensors of a pass, of which the output is the last."""
        self._seen[seen.name] = seen
        if seen.name == "y":
            name, (x, w, y) = self._names[id(seen.layer), seen.stack], (self._seen.pop(key) for key in ("x", "w", "y"))
            weights = {part.group: part.value for part in w.groups()}
            biases: Any = getattr(seen.layer, f"{seen.stack}_bias" if seen.stack else "bias", None)
            for part, output in zip(x.groups(), y.groups(), strict=True):
                bias = biases if biases is None or part.group is None else biases[part.group]
                _add(self._sums, name, part.value, weights[part.group], bias, output.value)


def _add(sums: Sums, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Add the squares of one product and of its noise."""
    with torch.autocast(x.device.type, enabled=False):
        exact = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).double().view_as(y)
    total = sums.setdefault(name, [0.0, 0.0])
    total[0] += exact.square().sum().item()
    total[1] += (y.double() - exact).square().sum().item()


def _of_weight(layer: Layer) -> float:
    weight, quantizer = plain(layer.weight.detach()), layer.weight_quantizer()
    if isinstance(weight, QuantizedTensor) or quantizer is None:
        return math.nan
    return _of(as_matrix(weight.t() if layer.transposed else weight), quantizer, layer.weight_state())


def _of_stack(stack: Stack) -> float:
    weight, recipe = plain(weight_of(stack).detach()), stack.holder.recipe
    if isinstance(weight, QuantizedTensor) or recipe is None:
        return math.nan
    turned = isinstance(stack.holder, Experts) and is_transposed(stack.holder)
    return _of(weight.transpose(1, 2) if turned else weight, recipe.w, states_of(stack.holder, stack.key).get("w"))


def _of(matrix: Tensor, quantizer: Quantizer, state: Mapping[str, Tensor] | None) -> float:
    """The signal-to-noise ratio of a matrix, or of a stack of them."""
    made = encode_operands(quantizer, matrix, col=False, state=state).row
    assert made is not None
    change = decode(made, torch.float32).double() - matrix.double()
    return _decibels(matrix.double().square().sum().item(), change.square().sum().item())


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
