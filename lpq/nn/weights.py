"""Preparing the weights of a converted model for sharding: how they are stored, and what is gathered of them."""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

from torch import nn

from lpq.core import QuantizedTensor
from lpq.core.derive import derives_col
from lpq.nn.linear import Linear

Weights = Literal["high_precision", "quantized"]


def prepare_weights(model: nn.Module, weights: Weights, ranks: int | None) -> None:
    """Have FSDP2 gather the weights of the converted layers in their quantized form, or store them so, too."""
    from lpq.distributed.fits import why_not
    from lpq.distributed.gathering import Gathering
    from lpq.distributed.shard import as_shard

    if weights not in get_args(Weights):
        raise ValueError(f"weights={weights!r}: it is one of {', '.join(map(repr, get_args(Weights)))}, or None")
    gathering = Gathering(model)
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    for name, layer in model.named_modules():
        if not isinstance(layer, Linear) or owners[id(layer.weight)] > 1:
            continue
        if hasattr(layer.weight, "device_mesh"):
            raise ValueError(f"{name}: its weight is sharded already; call lpq.convert before fully_shard")
        layer.gathering = gathering
        weight, quantizer = layer.weight.detach(), layer.weight_quantizer()
        if isinstance(weight, QuantizedTensor):
            continue
        if weights == "quantized" and quantizer is not None and why_not(quantizer, weight.shape[0], ranks or 1) is None:
            weight = quantizer.quantize(weight, col=not derives_col(quantizer))
        else:
            weight = as_shard(weight)
        layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
