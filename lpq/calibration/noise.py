"""The noise of formats in the output of each layer: its signal-to-noise ratio, in dB."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpq.calibration.collecting import Forward, evaluating, through
from lpq.calibration.errors import CalibrationError
from lpq.calibration.stacks import Stack, bias_of, matrix_of, stacks_in, watching_products, weight_of
from lpq.checkpoint.model import Model
from lpq.distributed.shard import plain
from lpq.engines.experts import states_of
from lpq.formats import Quantizer
from lpq.nn import GroupedLinear, Layer
from lpq.nn.experts import Experts, is_transposed
from lpq.operations.decoding import decode
from lpq.operations.operands import as_matrix, encode_operands
from lpq.tensor import QuantizedTensor

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
    with _watching(layers, stacks, sums), evaluating(model):
        for batch in batches:
            forward(model, batch)
    if not sums:
        raise CalibrationError("no batch went through a layer with a recipe: pass what the model is called with")
    of_weight = {name: partial(_of_weight, layer) for name, layer in layers.items()}
    of_weight |= {name: partial(_of_stack, stack) for name, stack in stacks.items()}
    found = [Noise(name, _decibels(*total), of_weight[name]()) for name, total in sums.items()]
    return sorted(found, key=lambda noise: (noise.output, noise.layer))


@contextmanager
def _watching(layers: Mapping[str, Layer], stacks: Mapping[str, Stack], sums: Sums) -> Iterator[None]:
    with ExitStack() as within:
        for name, layer in layers.items():
            within.callback(layer.register_forward_hook(_hook(name, sums), with_kwargs=True).remove)
        for name, stack in stacks.items():
            within.enter_context(watching_products(stack, _adding(name, stack, sums)))
        yield


def _adding(name: str, stack: Stack, sums: Sums) -> Callable[[Tensor, Tensor, Tensor], None]:
    def compare(x: Tensor, ends: Tensor, y: Tensor) -> None:
        start = 0
        bias = bias_of(stack)
        for expert, stop in enumerate(ends.tolist()):
            if stop > start:
                weight = matrix_of(weight_of(stack), stack.holder, expert)
                assert weight is not None
                added = None if bias is None else bias[expert]
                _add(sums, name, x[start:stop], _high(weight), added, y[start:stop])
            start = stop

    return compare


def _hook(name: str, sums: Sums) -> Callable[..., None]:
    def compare(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> None:
        x, weight = _high(args[0] if args else kwargs["input"]), _high(layer.weight)
        _add(sums, name, x, weight.t() if layer.transposed else weight, layer.bias, y)

    return compare


def _high(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else plain(tensor)


def _add(sums: Sums, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Add the squares of one product and of its noise."""
    with torch.autocast(x.device.type, enabled=False):
        exact = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    total = sums.setdefault(name, [0.0, 0.0])
    total[0] += exact.double().square().sum().item()
    total[1] += (y.double() - exact.double()).square().sum().item()


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
