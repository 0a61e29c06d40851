"""OCP MXFP4: 4-bit floats in blocks of 32 along the contraction, with a power-of-two scale for each block."""

from lpq.registry import FormatSpec, KernelSpec, RecipeSpec, hookimpl


@hookimpl
def lpq_register_formats() -> FormatSpec:
    return FormatSpec(
        name="mxfp4",
        summary="E2M1, one E8M0 scale for 32 elements along the contraction",
        quantizer="lpq_mxfp4.format:MXFP4Quantizer",
        storage="lpq_mxfp4.format:MXFP4Storage",
        effective_bits=4.25,
        # bf16 holds an element times a power of two, so that products with any format are bf16's on a GPU.
        kernels=(KernelSpec(op="exact", impl="lpq.emulation.bf16_gemm:decoded", backend="torch", min_sm=80),),
        schemes="lpq_mxfp4.engines:SCHEMES",
    )


@hookimpl
def lpq_register_recipes() -> list[RecipeSpec]:
    return [
        RecipeSpec(name="mxfp4", summary="MXFP4 for all three products", recipe="mxfp4()"),
        RecipeSpec(
            name="mxfp4-fwd-mxfp8-bwd",
            summary="MXFP4 forward, MXFP8 in both gradient products",
            recipe="fprop=mxfp4(), dgrad=mxfp8(), wgrad=mxfp8()",
        ),
    ]
