"""NVFP4 by MS-EDEN, for the operands of backward, and a recipe that has it."""

from lpq.registry import FormatSpec, KernelSpec, RecipeSpec, hookimpl

FORWARD = "hybrid(row=nvfp4, col=eden, col_source=row)"


@hookimpl
def lpq_register_formats() -> FormatSpec:
    return FormatSpec(
        name="eden",
        summary="NVFP4 by MS-EDEN: 128 columns rotated, scales rounded stochastically",
        quantizer="lpq_eden.format:EdenQuantizer",
        storage="lpq_eden.format:EdenStorage",
        effective_bits=4.5,
        kernels=(KernelSpec(op="exact", impl="lpq_eden.format:exact", backend="torch", min_sm=80),),
    )


@hookimpl
def lpq_register_recipes() -> RecipeSpec:
    return RecipeSpec(
        name="eden",
        summary="NVFP4 forward in 1x16, and backward by MS-EDEN of what forward's codes decode to",
        recipe=f"x={FORWARD}, w={FORWARD}, dy=eden()",
    )
