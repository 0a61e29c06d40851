"""Layers that hold their weight as ``[in, out]``, where ``nn.Linear`` has ``[out, in]``: Hugging Face's ``Conv1D``.

They multiply by a transposed view of the weight, which keeps its name, its shape and its values.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from lpq.nn.extended import Extension
from lpq.nn.linear import Layer

CLASSES = (("transformers.pytorch_utils", "Conv1D"),)
"""Classes that compute ``x @ weight + bias``, each as a module and a name in it. They are looked up, not imported."""


class TransposedLayer(Extension, Layer):
    """A layer with a weight of ``[in_features, out_features]``."""

    transposed = True

    @property
    def in_features(self) -> int:  # type: ignore[override]  # an nn.Linear sets it
        return self.weight.shape[0]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return self.weight.shape[1]

    @classmethod
    def attributes_for(cls, base: Any) -> dict[str, Any]:
        return {"kind": base.__name__}


def holds_transposed(module: nn.Module) -> bool:
    """Whether the module is a linear layer with a weight of ``[in, out]``, of a class that is not lpq's."""
    return any(type(module) is getattr(sys.modules.get(where), name, None) for where, name in CLASSES)
