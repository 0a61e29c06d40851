"""MXFP4: 4-bit floats in blocks of 32 along the contraction, with a power-of-two scale for each block."""

from lpq.registry import FormatSpec, KernelSpec, RecipeSpec, hookimpl

KERNELS = (
    # An element times a power of two has the element's bits. Below 2^-126 the last of them can be lost.
    KernelSpec(op="exact", impl="lpq.emulation.bf16_gemm:decoded", backend="torch", min_sm=80),
)


@hookimpl
def lpq_register_formats() -> FormatSpec:
    return FormatSpec(
        name="mxfp4",
        summary="E2M1, one E8M0 scale for 32 elements along the contraction",
        quantizer="lpq_mxfp4.quantizer:MXFP4Quantizer",
        storage="lpq_mxfp4.storage:MXFP4Storage",
        effective_bits=4.25,
        kernels=KERNELS,
        schemes="lpq_mxfp4.engines:SCHEMES",
    )


# Only column operands are rotated, and wgrad's are: so one quantizer serves a tensor in both its products.
X = "mxfp4(scale=even, rht=true)"
W = "mxfp4(scale=even)"
DY = "mxfp4(scale=ceil, rht=true, stochastic=true)"


@hookimpl
def lpq_register_recipes() -> list[RecipeSpec]:
    return [
        RecipeSpec(
            name="mxfp4",
            summary="MXFP4 for all three products: rotated wgrad operands, stochastic dy",
            recipe={"fprop": {"x": X, "w": W}, "dgrad": {"dy": DY, "w": W}, "wgrad": {"dy": DY, "x": X}},
        ),
        RecipeSpec(
            name="mxfp4-fwd-mxfp8-bwd",
            summary="MXFP4 forward, MXFP8 in both gradient products",
            recipe="fprop=mxfp4, dgrad=mxfp8, wgrad=mxfp8",
        ),
        RecipeSpec(
            name="mxfp4-fwd-bf16-bwd",
            summary="MXFP4 forward, bf16 gradients",
            recipe="fprop=mxfp4, dgrad=bf16, wgrad=bf16",
        ),
    ]
