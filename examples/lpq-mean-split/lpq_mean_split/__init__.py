"""The mean of the tokens apart: a format, a layer that multiplies the mean in high precision, and a recipe."""

from __future__ import annotations

from typing import Any

from lpq.registry import FormatSpec, RecipeSpec, hookimpl


@hookimpl
def lpq_register_formats() -> FormatSpec:
    return FormatSpec(
        name="mean_split",
        summary="the mean over tokens in fp32, and the rest by another format",
        quantizer="lpq_mean_split.format:MeanSplitQuantizer",
        storage="lpq_mean_split.format:MeanSplitStorage",
        effective_bits=None,
    )


@hookimpl
def lpq_register_recipes() -> RecipeSpec:
    return RecipeSpec(
        name="mean_split",
        summary="NVFP4, with the mean of the tokens of x in high precision in place of a rotation",
        recipe="x=mean_split(rest=nvfp4), w=nvfp4(block=16x16), dy=nvfp4(stochastic=true)",
    )


@hookimpl
def lpq_convert_module(module: Any, fqn: str, recipe: Any) -> Any:
    from lpq_mean_split.layers import converted

    return converted(module, fqn, recipe)
