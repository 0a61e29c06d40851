"""The way back: a converted model becomes what it was, in place."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lpq.nn.adopted_norms import release
from lpq.nn.conversion import BEFORE, RECORD
from lpq.nn.conversion_plan import TAKEN
from lpq.nn.extended import Extension, check_extended
from lpq.nn.extended import restore as restore_class
from lpq.nn.first_argument import Model, check_model
from lpq.nn.fused_blocks import unfuse
from lpq.nn.linear import Linear
from lpq.nn.norms import EncodingNorm
from lpq.nn.stateful_layer import StatefulLayer
from lpq.tensor import QuantizedTensor
from lpq.tensor.fsdp_protocol import Gathered


def restore(model: Model) -> Model:
    """Give the layers of a converted model their former classes, as ``nn.Linear``, and return the model.

    Parameters, hooks and references to the layers stay, so an optimizer goes on. Recipes and the states of quantizers
    leave, and fused blocks become what they were, as by ``lpq.unfuse``. A model that cannot be restored as a whole is
    refused, and nothing in it is changed: one whose weights are sharded, or were prepared for that by
    ``convert(…, weights=…)``, and one with layers that a plugin made in place of others.

    Args:
        model: The model that ``lpq.convert`` returned, or a part of it.
    """
    check_model(model)
    for name, module in model.named_modules():
        if isinstance(module, Extension):
            check_extended(module)
        if (why := _why_kept(module)) is not None:
            raise ValueError(f"{name or 'the model'} ({type(module).__name__}) cannot be restored: {why}")
    unfuse(model)
    for module in model.modules():
        if isinstance(module, StatefulLayer) and (former := _former(module)) is not None:
            _restore_layer(module, former)
        vars(module).pop(RECORD, None)
        vars(module).update(vars(module).pop(BEFORE, {}))
        if isinstance(module, EncodingNorm) and module.consumers:
            release(module)
    return model


def _former(layer: StatefulLayer) -> type[nn.Module] | None:
    """The class that ``lpq.convert`` found; None for a layer that was built as it is, or that a plugin made."""
    if isinstance(layer, Extension):
        return layer.lpq_bases[1]
    own = next(c for c in type(layer).__mro__ if not c.__module__.startswith("torch."))  # as torch makes classes of it
    return nn.Linear if own is Linear else None


def _why_kept(module: nn.Module) -> str | None:
    """Why a module cannot become what it was; None if it can, or is not lpq's."""
    if not isinstance(module, StatefulLayer):
        return "a plugin made it in place of another module: build the model anew" if TAKEN in vars(module) else None
    if _former(module) is None:
        if module.recipe is None:
            return None
        return "you or a plugin built it: with `recipe = None` it multiplies in high precision, and is left alone here"
    if is_parametrized(module):
        return "it was parametrized since: call torch.nn.utils.parametrize.remove_parametrizations before"
    own = [*module.parameters(recurse=False)]
    if getattr(module, "layouts", None) is not None or any(hasattr(p, "device_mesh") for p in own):
        return "it is sharded: restore the model before fully_shard and parallelize_module, or build it anew"
    if any(isinstance(p, Gathered | QuantizedTensor) for p in own):
        return (
            "its weight is not the one that it had: lpq.convert(…, weights=…) prepared it, or lpq.load_quantized read "
            "it. Build the model anew, and load a checkpoint"
        )
    if module.passes.observers or module.passes.held_weight is not None:
        return "it holds its weight, or is observed: leave lpq.hold_weights, or the observer, before"
    return None


def _restore_layer(layer: StatefulLayer, former: Any) -> None:
    for name in layer.memories():
        delattr(layer, name)
    theirs = {name for cls in former.__mro__ for name in vars(cls).get("__annotations__", ())}
    ours = {name for cls in type(layer).__mro__ for name in vars(cls).get("__annotations__", ())}
    if isinstance(layer, Extension):
        restore_class(layer)
    else:
        layer.__class__ = former
    for name in ours - theirs:
        vars(layer).pop(name, None)
