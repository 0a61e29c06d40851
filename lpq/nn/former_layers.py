"""Layers in pickles of the previous version, which had the parts of their model and of their passes as attributes."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from lpq.nn.converted_model import ConvertedModel
from lpq.nn.passes import Passes

OF_A_RUN = (
    "_calls", "_checked", "_held", "_ran", "_seen", "_static_checked", "_static_input", "gather", "model_check",
    "read_past", "stages",
)  # fmt: skip
"""Attributes that no copy had from its layer, or that meant nothing in another process."""


def as_now(layer: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a layer that is copied or loaded as layers of this version have it."""
    if "passes" in state:
        return state
    now = {key: value for key, value in state.items() if key not in OF_A_RUN}
    fsdp, rounded = now.pop("gathering", None), now.pop("rounded", False)
    now["model"] = ConvertedModel(now.pop("_inputs", None), now.pop("accumulate", None), fsdp=fsdp)
    now["passes"] = Passes(now.pop("_recipe", None), now.pop("_plan", None), now.pop("traced", False))
    if "gather" in state:
        now["gather"] = None
    if fsdp is not None:
        from lpq.distributed.weight_gather import Gather, GatheredLayer

        now["gather"] = Gather(cast(GatheredLayer, layer), rounded)
    return now
