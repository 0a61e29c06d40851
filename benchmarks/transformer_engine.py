"""TransformerEngine (tried with 2.20), where it is installed: layers and blocks under its recipes, and its casts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

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


def scope(name: str) -> Callable[[], AbstractContextManager[None]]:
    """The scope in which a recipe counts; it is entered for each pass.

    It has a state of its own: in TransformerEngine's one state for the process, every step of any recipe would update
    the scales of all layers with delayed scaling that were ever run.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalState

    state, made = FP8GlobalState(), recipe(name)

    def enter() -> AbstractContextManager[None]:
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.quantization_state = state
        found: AbstractContextManager[None] = te.autocast(enabled=True, recipe=made)
        return found

    return enter


class Autocast(nn.Module):
    """A module that runs under one of its recipes."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.module, self.scope = module, scope(name)

    def forward(self, *inputs: Tensor) -> Tensor:
        with self.scope():
            y: Tensor = self.module(*inputs)
            return y


class Block(nn.Module):
    """Its own block where Hugging Face's Llama has a decoder layer: norms, attention and the feed-forward half."""

    def __init__(self, config: Any) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.block = te.TransformerLayer(
            config.hidden_size, config.intermediate_size, config.num_attention_heads,
            num_gqa_groups=config.num_key_value_heads, layernorm_epsilon=config.rms_norm_eps,
            hidden_dropout=0.0, attention_dropout=0.0, bias=False, fuse_qkv_params=True,
            normalization="RMSNorm", activation="swiglu", attn_input_format="bshd",
        )  # fmt: skip
        width = config.hidden_size // config.num_attention_heads
        self.angles = te.RotaryPositionEmbedding(width)(config.max_position_embeddings)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        y: Tensor = self.block(x, rotary_pos_emb=self.angles)
        return y


def with_own_blocks(model: Any, name: str | None) -> nn.Module:
    """A Llama of Hugging Face's without its head, its layers replaced by TransformerEngine's blocks; None is bf16."""
    model.layers = nn.ModuleList(Block(model.config) for _ in model.layers)
    if name is not None:
        enter, inner = scope(name), model.forward

        def forward(*inputs: Any, **named: Any) -> Any:
            with enter():
                return inner(*inputs, **named)

        model.forward = forward
    return cast("nn.Module", model)


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
