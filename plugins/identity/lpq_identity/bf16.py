"""The recipe ``bf16``. A name belongs to the plugin that it begins with, so this is a plugin of its own."""

from lpq.registry import RecipeSpec, hookimpl


@hookimpl
def lpq_register_recipes() -> RecipeSpec:
    return RecipeSpec(name="bf16", summary="bf16 for all three products", recipe="identity(dtype=bfloat16)")
