"""The noise of formats in the output of each layer: its signal-to-noise ratio, in dB."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpq.calibration.collecting import Forward, evaluating, through
from lpq.calibration.errors import CalibrationError
from lpq.calibration.targets import places
from lpq.checkpoint.model import Model
from lpq.nn.observing import observing
from lpq.tensor import QuantizedTensor
from lpq.tensor.observed import Observed


class Noise(NamedTuple):
    """The noise of one layer."""

    layer: str
    output: float
    """The ratio of its output to the change by its formats, in dB: 6 dB are a bit. Infinite where nothing changes."""
    weight: float
    """The ratio for the weight alone, as forward multiplies it; NaN where it is stored quantized."""


@torch.no_grad()
def layer_noise(model: nn.Module, batches: Iterable[Any], *, forward: Forward = through) -> list[Noise]:
    """Measure the noise of each layer with a recipe, on batches that go through the model; list the noisiest first.

    A layer's output is compared with the product in fp32 of the same input, which is noisy itself where layers before
    it are.

    Args:
        model: A converted model that is not sharded.
        batches: Tensors, sequences of arguments or mappings of them.
        forward: ``forward(model, batch)`` calls the model in another way than with the arguments of the batch.
    """
    layers = {
        (place.layer, place.stack): place.name if place.expert is None else place.weight.removesuffix(".weight")
        for place in places(Model(model))
    }
    for (layer, _), name in layers.items():
        if any(hasattr(parameter, "device_mesh") for parameter in layer.parameters(recurse=False)):
            raise CalibrationError(f"{name} is sharded: measure the noise of the model before it is")
    if not layers:
        raise CalibrationError("no layer has a recipe, whose noise could be measured: convert the model, lpq.convert")
    comparing = _Comparing({(id(layer), stack): name for (layer, stack), name in layers.items()})
    with observing([layer for layer, _ in layers], comparing), evaluating(model):
        for batch in batches:
            forward(model, batch)
    if not comparing.outputs:
        raise CalibrationError("no batch went through a layer with a recipe: pass the arguments of the model")
    noises = [Noise(name, _decibels(*sums), comparing.weights[name]) for name, sums in comparing.outputs.items()]
    return sorted(noises, key=lambda noise: (noise.output, noise.layer))


class _Comparing:
    """Compares each output with the product in high precision of the same input, and each weight with its operand."""

    def __init__(self, names: Mapping[tuple[int, str], str]) -> None:
        """``names``: of each layer or stack, by the ``id`` of its module and its name in that."""
        self._names = names
        self._tensors: dict[str, Observed] = {}
        self.outputs: dict[str, list[float]] = {}
        """The squares of outputs and of their noise."""
        self.weights: dict[str, float] = {}

    def observe(self, tensor: Observed) -> None:
        """Take the tensors of a pass; the output comes last."""
        self._tensors[tensor.name] = tensor
        if tensor.name != "y":
            return
        x, w, name = self._tensors["x"], self._tensors["w"], self._names[id(tensor.layer), tensor.stack]
        self._tensors.clear()
        if name not in self.weights:
            self.weights[name] = _of_weight(w)
        weights = {part.group: part.value for part in w.groups()}
        biases: Any = getattr(tensor.layer, f"{tensor.stack}_bias" if tensor.stack else "bias", None)
        for part, y in zip(x.groups(), tensor.groups(), strict=True):
            bias = None if biases is None else (biases if part.group is None else biases[part.group]).float()
            with torch.autocast(part.value.device.type, enabled=False):
                exact = F.linear(part.value.float(), weights[part.group].float(), bias).double().view_as(y.value)
            _add(self.outputs.setdefault(name, [0.0, 0.0]), exact, y.value.double())


def _of_weight(w: Observed) -> float:
    if isinstance(w.given, QuantizedTensor):
        return math.nan
    sums = [0.0, 0.0]
    for matrix in w.groups():
        row, _ = matrix.decoded()
        assert row is not None
        _add(sums, matrix.value.double(), row.double())
    return _decibels(*sums)


def _add(sums: list[float], exact: Tensor, actual: Tensor) -> None:
    """Add the squares of a tensor and of its noise."""
    sums[0] += exact.square().sum().item()
    sums[1] += (actual - exact).square().sum().item()


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
