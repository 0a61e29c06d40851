"""A plugin for axolotl, imported when it is used: it converts the model before adapters, and adds the callback.

In axolotl's YAML::

    plugins: [lpq.integrations.axolotl.LpqPlugin]
    lpq_policy: …
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

import lpq

__all__ = ["LpqArgs", "LpqPlugin"]

if TYPE_CHECKING:
    LpqArgs: type[Any]
    LpqPlugin: type[Any]


class _Plugin:
    """Converts the model that axolotl has loaded, and follows the steps of its Trainer."""

    def get_input_args(self) -> str:
        """The keys that this plugin adds to the YAML."""
        return f"{__name__}.LpqArgs"

    def post_model_build(self, cfg: Any, model: nn.Module) -> None:
        """Convert the model, before there are adapters."""
        policy = cfg.lpq_policy.to_dict() if hasattr(cfg.lpq_policy, "to_dict") else cfg.lpq_policy
        if policy is None:
            raise ValueError("lpq.integrations.axolotl.LpqPlugin needs lpq_policy: a recipe or rules")
        lpq.convert(model, policy, steps="later", weights=cfg.lpq_weights, ranks=cfg.lpq_ranks, fuse=bool(cfg.lpq_fuse))

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        from lpq.integrations.transformers import LpqCallback

        return [LpqCallback()]

    def post_train(self, cfg: Any, model: nn.Module) -> None:
        """Write the codes of training for an engine, where the YAML asks for it."""
        if cfg.lpq_export:
            lpq.export(model, cfg.lpq_export)


def __getattr__(name: str) -> Any:
    cls: Any
    if name == "LpqArgs":
        from pydantic import create_model

        create: Any = create_model
        keys: dict[str, Any] = {
            "policy": str | dict[str, Any],
            "weights": str,
            "ranks": int,
            "fuse": bool,
            "export": str,
        }
        cls = create(name, __module__=__name__, **{f"lpq_{key}": (kind | None, None) for key, kind in keys.items()})
    elif name == "LpqPlugin":
        from axolotl.integrations.base import BasePlugin

        cls = type(name, (_Plugin, BasePlugin), {"__module__": __name__, "__doc__": _Plugin.__doc__})
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = cls
    return cls
