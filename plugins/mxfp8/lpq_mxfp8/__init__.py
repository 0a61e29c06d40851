"""MXFP8: 8-bit floats in blocks of 32 along the contraction, with a power-of-two scale for each block."""

from lpq.registry import FormatSpec, KernelSpec, RecipeSpec, hookimpl

UNTRIED = "never run on hardware: it is written after torch's rules, and tested without a GPU"
KERNELS = (
    KernelSpec.cuda("measure", "lpq_mxfp8.cuda:measure", rounds=True),
    KernelSpec.cuda("quantize", "lpq_mxfp8.cuda:quantize", bind="lpq_mxfp8.cuda:bind", rounds=True),
    KernelSpec.cuda("decode", "lpq_mxfp8.views:decode"),
    *(KernelSpec.cuda(op, f"lpq_mxfp8.tile:{op}") for op in ("tile", "exact_tile")),
    KernelSpec.cuda("reader", "lpq_mxfp8.views:reader"),
    *(
        KernelSpec.triton(op, f"lpq_mxfp8.triton:{op}")
        for op in ("measure", "quantize", "decode", "stored_tile", "tile_program")
    ),
    KernelSpec(
        op="gemm", impl="lpq_mxfp8.gemm:native", why_not="lpq_mxfp8.gemm:why_not", formats=("mxfp8", "mxfp8"),
        backend="torch", min_sm=100, priority=10, note=UNTRIED,
    ),
    # An element times a power of two has the element's bits. Below 2^-126 the last of them can be lost.
    KernelSpec.cuda("exact", "lpq.emulation.bf16_gemm:decoded", bind="lpq_mxfp8.views:bind_exact"),
    KernelSpec(op="exact", impl="lpq.emulation.bf16_gemm:decoded", backend="torch", min_sm=80),
)  # fmt: skip


@hookimpl
def lpq_register_formats() -> FormatSpec:
    return FormatSpec(
        name="mxfp8",
        summary="E4M3 or E5M2, one E8M0 scale for 32 elements along the contraction",
        quantizer="lpq_mxfp8.quantizer:MXFP8Quantizer",
        storage="lpq_mxfp8.storage:MXFP8Storage",
        effective_bits=8.25,
        kernels=KERNELS,
        schemes="lpq_mxfp8.engines:SCHEMES",
    )


@hookimpl
def lpq_register_recipes() -> list[RecipeSpec]:
    return [
        RecipeSpec(
            name="mxfp8", summary="MXFP8 for all three products", recipe="mxfp8()", aliases=("MXFP8BlockScaling",)
        ),
        RecipeSpec(
            name="mxfp8-one-copy",
            summary="MXFP8, each column operand made of the row operand, the one that is kept and sent",
            recipe="hybrid(row=mxfp8, col=mxfp8, col_source=row)",
        ),
        RecipeSpec(
            name="mxfp8-fwd-nvfp4-bwd",
            summary="MXFP8 forward, NVFP4 in both gradient products",
            recipe="fprop=mxfp8, dgrad=nvfp4, wgrad=nvfp4",
        ),
        RecipeSpec(
            name="mxfp8-fwd-bf16-bwd",
            summary="MXFP8 forward, bf16 gradients",
            recipe="fprop=mxfp8, dgrad=bf16, wgrad=bf16",
        ),
    ]
