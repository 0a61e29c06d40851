"""PEFT's adapters over layers with a recipe: trained as they will compute once they are merged.

An adapter that is added to the output of a quantized layer may be lost when it is merged: a change of less than half a
step of the format is rounded away. ``merge_aware`` has the layer multiply the sum of its weight and the adapter,
rounded as its recipe rounds weights, and the gradient goes straight through that. Merging then changes nothing: it
stores the weight that was multiplied. It costs a second product in forward, and a gradient of the size of the weight in
backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lpq.nn import Layer
from lpq.nn.first_argument import check_model
from lpq.tensor import QuantizedTensor


class MergeAware:
    """A variant of LoRA, as PEFT calls what takes the place of its own arithmetic for one adapter."""

    @staticmethod
    def init(module: Any, adapter_name: str) -> None:
        """Nothing is added to the adapter."""

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **others: Any) -> Tensor:
        """The output of the layer with the merged weight, in place of ``result``, the output with its own weight."""
        if len(module.active_adapters) > 1:
            raise RuntimeError(
                f"the adapters {', '.join(module.active_adapters)} of a layer are active together, and merge-aware "
                "ones are rounded one at a time: activate one, model.set_adapter(…)"
            )
        layer = module.get_base_layer()
        merged = _merged(module, active_adapter, layer.weight)
        y: Tensor = functional_call(layer, {"weight": merged}, (x,))
        return y

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        """The merged weight, stored as the weight is."""
        with torch.no_grad():
            merged = orig_weight.clone()
            merged.copy_(_merged(module, active_adapter, orig_weight))
        return merged

    @staticmethod
    def merge_unsafe(module: Any, active_adapter: str, orig_weight: Tensor) -> None:
        """Store the merged weight; one that is stored quantized is encoded once, as in forward."""
        with torch.no_grad():
            orig_weight.copy_(_merged(module, active_adapter, orig_weight))

    @staticmethod
    def unmerge(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        """Refuse for a weight that was rounded."""
        if isinstance(orig_weight, QuantizedTensor):
            raise RuntimeError(
                "a weight that is stored quantized was rounded when the adapter was merged, and the one before is not "
                "there: load the base again"
            )
        without: Tensor = orig_weight - module.get_delta_weight(active_adapter).to(orig_weight.dtype)
        return without


def merge_aware(model: nn.Module) -> nn.Module:
    """Have each LoRA adapter over a layer with a recipe train as it will compute when it is merged; return the model.

    ``merge_and_unload`` then gives the outputs that the adapter was trained with, to the bit. One adapter of a layer is
    active at a time, without dropout and without a bias of its own.

    Args:
        model: The model that ``get_peft_model`` returns.
    """
    check_model(model)
    count = 0
    for name, module in model.named_modules():
        lora: Any = module
        layer = lora.get_base_layer() if hasattr(lora, "get_base_layer") and hasattr(lora, "lora_variant") else None
        if not isinstance(layer, Layer) or layer.recipe is None:
            continue
        for adapter in lora.lora_A:
            _check(name, lora, layer, adapter)
            lora.lora_variant[adapter] = MergeAware()
            count += 1
    if not count:
        raise ValueError(
            "no LoRA adapter of the model is over a layer with a recipe: call lpq.convert first, "
            "then get_peft_model, and then this"
        )
    return model


def _check(name: str, module: Any, layer: Layer, adapter: str) -> None:
    why = None
    if module.lora_variant.get(adapter) is not None and not isinstance(module.lora_variant[adapter], MergeAware):
        why = f"is a {type(module.lora_variant[adapter]).__name__}, and plain LoRA is wanted"
    elif getattr(module.lora_dropout[adapter], "p", 0.0):
        why = "has dropout, which no merged weight has: use lora_dropout=0"
    elif module.lora_bias[adapter]:
        why = "has a bias of its own: use lora_bias=False"
    elif hasattr(layer.weight, "device_mesh"):
        why = "is over a weight that is sharded, and that is not built: train it in one process"
    elif module.merged:
        why = "is merged already"
    elif isinstance(layer.weight, QuantizedTensor) and any(
        side.state for side in layer.weight.quantizer.state_branches().values()
    ):
        why = (
            f"is over a weight that is stored as {layer.weight.quantizer}: a merged one is stored by statistics of its "
            "own, and training encodes it by remembered ones: convert without weights=, or by a recipe whose weights "
            "remember nothing"
        )
    if why is not None:
        raise ValueError(f"{name}: its adapter {adapter!r} {why}")


def _merged(module: Any, adapter: str, weight: Tensor) -> Tensor:
    """The sum of a weight and its adapter, in the dtype of the weight."""
    values = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight.detach()
    delta: Tensor = module.get_delta_weight(adapter)
    return values + delta.to(values.dtype)
