"""How much of the output of each layer is noise of its formats: its signal-to-noise ratio, in dB."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpq.calibration.collecting import Forward, through
from lpq.calibration.errors import CalibrationError
from lpq.checkpoint.model import Model
from lpq.distributed.shard import plain
from lpq.nn import Layer
from lpq.operations.decoding import decode
from lpq.operations.operands import as_matrix, encode_operands
from lpq.tensor import QuantizedTensor


class Noise(NamedTuple):
    """One layer."""

    layer: str
    output: float
    """The ratio of its output to what formats change in that, in dB: 6 dB are a bit. Infinite where nothing changes."""
    weight: float
    """The same of the weight alone, as forward multiplies it; NaN where it is stored quantized."""


@torch.no_grad()
def layer_noise(model: nn.Module, batches: Iterable[Any], *, forward: Forward = through) -> list[Noise]:
    """The noise of each layer with a recipe, the noisiest first, on batches that go through the model.

    A layer's output is compared with the product in fp32 of the same input, which is noisy itself where layers before
    it are. It is for models that are not sharded.
    """
    sums: dict[str, list[float]] = {}
    layers = {name: layer for name, layer in Model(model).layers() if layer.recipe is not None}
    for name, layer in layers.items():
        if hasattr(layer.weight, "device_mesh"):
            raise CalibrationError(f"{name} is sharded: measure the noise of the model before it is")
    training = [module for module in model.modules() if module.training]
    with _watching(layers, sums):
        model.eval()
        try:
            for batch in batches:
                forward(model, batch)
        finally:
            for module in training:
                module.training = True
    found = [Noise(name, _decibels(*total), _of_weight(layers[name])) for name, total in sums.items()]
    return sorted(found, key=lambda noise: (noise.output, noise.layer))


@contextmanager
def _watching(layers: dict[str, Layer], sums: dict[str, list[float]]) -> Iterator[None]:
    hooks = [layer.register_forward_hook(_hook(name, sums)) for name, layer in layers.items()]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _hook(name: str, sums: dict[str, list[float]]) -> Callable[..., None]:
    def compare(layer: Any, args: tuple[Any, ...], y: Tensor) -> None:
        x, weight = (t.dequantize() if isinstance(t, QuantizedTensor) else plain(t) for t in (args[0], layer.weight))
        with torch.autocast(x.device.type, enabled=False):
            weight = (weight.t() if layer.transposed else weight).float()
            exact = F.linear(x.float(), weight, None if layer.bias is None else layer.bias.float())
        total = sums.setdefault(name, [0.0, 0.0])
        total[0] += exact.double().square().sum().item()
        total[1] += (y.double() - exact.double()).square().sum().item()

    return compare


def _of_weight(layer: Layer) -> float:
    weight, quantizer = plain(layer.weight.detach()), layer.weight_quantizer()
    if isinstance(weight, QuantizedTensor) or quantizer is None:
        return math.nan
    matrix = as_matrix(weight.t() if layer.transposed else weight)
    made = encode_operands(quantizer, matrix, col=False, state=layer.weight_state()).row
    assert made is not None
    change = decode(made, torch.float32).double() - matrix.double()
    return _decibels(matrix.double().square().sum().item(), change.square().sum().item())


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
