"""TransformerEngine (tried with 2.20), where it is installed: its layers under each of its recipes, and its casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

RECIPES = ("delayed", "current", "block")


def recipe(name: str) -> Any:
    """One of its recipes with its defaults."""
    from transformer_engine.common import recipe as recipes

    made = {
        "delayed": recipes.DelayedScaling,
        "current": recipes.Float8CurrentScaling,
        "block": recipes.Float8BlockScaling,
    }
    return made[name]()


class Autocast(nn.Module):
    """A module that runs under one of its recipes.

    It has a state of its own: in TransformerEngine's one state for the process, every step of any recipe would update
    the scales of all layers with delayed scaling that were ever run.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        from transformer_engine.pytorch.quantization import FP8GlobalState

        super().__init__()
        self.module, self.recipe, self.state = module, recipe(name), FP8GlobalState()

    def forward(self, *inputs: Tensor) -> Tensor:
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.quantization_state = self.state
        with te.autocast(enabled=True, recipe=self.recipe):
            y: Tensor = self.module(*inputs)
            return y


def convert(module: nn.Module, name: str) -> nn.Module:
    """The module with its layers in place of every ``nn.Linear``."""
    import transformer_engine.pytorch as te

    for path, child in list(module.named_modules()):
        if isinstance(child, nn.Linear):
            made = te.Linear(
                child.in_features, child.out_features, bias=child.bias is not None,
                params_dtype=child.weight.dtype, device=child.weight.device,
            )  # fmt: skip
            made.load_state_dict(child.state_dict(), strict=False)
            parent, _, leaf = path.rpartition(".")
            setattr(module.get_submodule(parent), leaf, made)
    return Autocast(module, name)


def casts() -> dict[tuple[str, str], tuple[int, Callable[[Tensor], Any]]]:
    """Its casts to FP8 by name and operands; with each, how often it must read its input."""
    import transformer_engine.pytorch as te  # before its extension, which it loads the libraries of
    import transformer_engine_torch as tex

    e4m3, one = tex.DType.kFloat8E4M3, torch.ones(1, device="cuda")
    made: dict[tuple[str, str], tuple[int, Callable[[Tensor], Any]]] = {}
    for sides, col in (("row", False), ("both", True)):
        current = te.Float8CurrentScalingQuantizer(e4m3, device=one.device, rowwise=True, columnwise=col)
        made["current", sides] = (2, current)
        made["delayed", sides] = (1, te.Float8Quantizer(one, one.clone(), e4m3, rowwise=True, columnwise=col))
        for name, dim in (("block 1x128", 1), ("block 128x128", 2)):
            block = te.Float8BlockQuantizer(e4m3, rowwise=True, columnwise=col, block_scaling_dim=dim)
            made[name, sides] = (1, block)
    return made
