"""Layers that hold their weight as ``[in, out]``, where ``nn.Linear`` has ``[out, in]``: Hugging Face's ``Conv1D``.

To other code the module stays the same: its class is a subclass of its former one, and its parameters keep their names,
shapes and values. It multiplies by a transposed view of its weight.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from lpq.nn.linear import Layer

if TYPE_CHECKING:
    from lpq.recipes import RecipeLike

CLASSES = (("transformers.pytorch_utils", "Conv1D"),)
"""Classes that compute ``x @ weight + bias``, each as a module and a name in it. They are looked up, not imported."""


class TransposedLayer(Layer):
    """A layer with a weight of ``[in_features, out_features]``. Its class is made by ``class_for``."""

    transposed = True
    base: ClassVar[type[nn.Module]]
    """The class of the module before the conversion."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the class before the conversion: no module has the class of the layer."""
        return _empty, (self.base,), self.__getstate__()


def holds_transposed(module: nn.Module) -> bool:
    """Whether the module is a linear layer with a weight of ``[in, out]``, of a class that is not lpq's."""
    return any(type(module) is getattr(sys.modules.get(where), name, None) for where, name in CLASSES)


@cache
def class_for(base: Any) -> type[TransposedLayer]:
    """The class of layers that modules of the class ``base`` become."""
    own = {"base": base, "kind": base.__name__, "__module__": __name__}
    made: type[TransposedLayer] = type(base.__name__, (TransposedLayer, base), own)
    return made


def adopt(module: nn.Module, recipe: RecipeLike | None) -> TransposedLayer:
    """Turn this very module into a layer: parameters, hooks and references to it stay."""
    base: Any = type(module)
    module.__class__ = class_for(base)
    assert isinstance(module, TransposedLayer)
    module.begin()
    module.in_features, module.out_features = module.weight.shape
    module.recipe = recipe
    return module


def _empty(base: Any) -> TransposedLayer:
    """A fresh layer, whose state comes from ``__setstate__``."""
    cls = class_for(base)
    return cls.__new__(cls)
