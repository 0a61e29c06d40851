"""MXFP4: 4-bit floats in blocks of 32 along the contraction, with a power-of-two scale for each block."""

from lpq.registry import FormatSpec, KernelSpec, RecipeSpec, hookimpl

KERNELS = (
    KernelSpec.cuda("measure", "lpq_mxfp4.cuda:measure", why_not="lpq_mxfp4.cuda:why_not", rounds=True),
    KernelSpec.cuda(
        "quantize", "lpq_mxfp4.cuda:quantize", bind="lpq_mxfp4.cuda:bind", why_not="lpq_mxfp4.cuda:why_not",
        rounds=True,
    ),
    KernelSpec.cuda("decode", "lpq_mxfp4.views:decode"),
    *(KernelSpec.cuda(op, f"lpq_mxfp4.tile:{op}") for op in ("tile", "exact_tile")),
    KernelSpec.cuda("reader", "lpq_mxfp4.views:reader"),
    *(
        KernelSpec.triton(op, f"lpq_mxfp4.triton:{op}") for op in ("measure", "quantize", "decode", "tile_program")
    ),
    # An element times a power of two has the element's bits. Below 2^-126 the last of them can be lost.
    KernelSpec.cuda("exact", "lpq.emulation.bf16_gemm:decoded", bind="lpq_mxfp4.views:bind_exact"),
    KernelSpec(op="exact", impl="lpq.emulation.bf16_gemm:decoded", backend="torch", min_sm=80),
)  # fmt: skip


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
            aliases=("MXFP4BlockScaling",),
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
