"""verl's FSDP engine with converted layers, which refits rollouts with the codes of training.

``register`` is called in a module of the user's, which ``actor_rollout_ref.model.external_lib`` names::

    import lpq.integrations.verl
    lpq.integrations.verl.register(policy, layout="compressed-tensors")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from verl.utils.device import get_device_name, get_vendor
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

import lpq

__all__ = ["LpqEngine", "register"]


class LpqEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's engine for language models that it trains by FSDP2, with a policy."""

    policy: Any = None
    layout: str | None = None
    options: Mapping[str, Any] = {}

    def _build_module(self) -> nn.Module:
        """Load the model as verl does, and convert it; the reference model stays as it is."""
        module: nn.Module = super()._build_module()
        return module if self.engine_config.forward_only else lpq.convert(module, self.policy)

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The tensors for rollouts: in the layout, or as verl has them."""
        if self.layout is None or self.engine_config.forward_only or hasattr(self.module, "peft_config"):
            params: tuple[Any, Any] = super().get_per_tensor_param(*args, **kwargs)
            return params
        return lpq.export.stream(self.module, self.layout, **self.options), None


def register(policy: Any, *, layout: str | None = None, **options: Any) -> type[LpqEngine]:
    """Have verl train language models by ``strategy: fsdp2`` under a policy.

    Args:
        policy: As for ``lpq.convert``: a recipe, a file or rules.
        layout: The layout in which rollouts get the weights, as for ``lpq.export``. None: as verl
            gives them, in high precision.
        options: More for ``lpq.export.stream``: ``input_amax=``, ``leave=``, ``dtype=``.
    """
    attributes = {"policy": policy, "layout": layout, "options": options, "__module__": __name__}
    engine = type("RegisteredEngine", (LpqEngine,), attributes)
    # verl prefers the engine of a vendor to the engine of a device, which it has registered itself.
    EngineRegistry.register("language_model", "fsdp2", get_device_name(), get_vendor())(engine)
    return engine
