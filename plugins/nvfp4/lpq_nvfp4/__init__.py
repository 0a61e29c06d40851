"""NVFP4: 4-bit floats with an 8-bit scale for each block of 16 or 16x16 and an fp32 amax for the operand."""

from lpq.registry import FormatSpec, KernelSpec, RecipeSpec, hookimpl

UNTRIED = "never run on hardware: it is written after torch's rules, and tested without a GPU"
SEARCHED = "lpq_nvfp4.search:why_not"
EDEN = "lpq_nvfp4.eden:why_not"
KERNELS = (
    KernelSpec.cuda("measure", "lpq_nvfp4.cuda:measure", why_not="lpq_nvfp4.cuda:why_not", rounds=True),
    KernelSpec.cuda(
        "quantize", "lpq_nvfp4.cuda:quantize", bind="lpq_nvfp4.cuda:bind", why_not="lpq_nvfp4.cuda:quantize_why_not",
        rounds=True,
    ),
    KernelSpec.cuda(
        "measure", "lpq_nvfp4.eden_cuda:measure", why_not="lpq_nvfp4.eden:why_not_this", rounds=True,
    ),
    KernelSpec.cuda(
        "quantize", "lpq_nvfp4.eden_cuda:quantize", bind="lpq_nvfp4.eden_cuda:bind",
        why_not="lpq_nvfp4.eden:why_not_this", rounds=True,
    ),
    KernelSpec.cuda(
        "transpose", "lpq_nvfp4.views:transpose", bind="lpq_nvfp4.views:bind_transpose",
        several="lpq_nvfp4.views:bind_transposes",
    ),
    KernelSpec.cuda("decode", "lpq_nvfp4.views:decode", why_not=EDEN),
    KernelSpec.cuda("decode", "lpq_nvfp4.eden_cuda:decode", why_not="lpq_nvfp4.eden:why_not_this"),
    *(KernelSpec.cuda(op, f"lpq_nvfp4.tile:{op}", why_not=SEARCHED) for op in ("tile", "exact_tile")),
    *(
        KernelSpec.cuda(op, f"lpq_nvfp4.eden_cuda:{op}", why_not="lpq_nvfp4.eden:why_not_this")
        for op in ("tile", "exact_tile")
    ),
    KernelSpec.cuda("exact", "lpq_nvfp4.gemm:exact_in_cuda", bind="lpq_nvfp4.gemm:bind_exact"),
    *(KernelSpec.triton(op, f"lpq_nvfp4.triton:{op}", why_not=EDEN) for op in ("measure", "decode")),
    KernelSpec.triton("transpose", "lpq_nvfp4.triton:transpose"),
    *(KernelSpec.triton(op, f"lpq_nvfp4.triton:{op}", why_not=SEARCHED) for op in ("quantize", "tile_program")),
    *(
        KernelSpec.triton(op, f"lpq_nvfp4.eden_triton:{op}", why_not="lpq_nvfp4.eden:why_not_this")
        for op in ("measure", "quantize", "decode")
    ),
    KernelSpec(
        op="gemm", impl="lpq_nvfp4.gemm:native", why_not="lpq_nvfp4.gemm:why_not", formats=("nvfp4", "nvfp4"),
        backend="torch", min_sm=100, priority=10, note=UNTRIED,
    ),
    KernelSpec(op="exact", impl="lpq_nvfp4.gemm:exact", backend="torch", min_sm=80),
)  # fmt: skip


@hookimpl
def lpq_register_formats() -> FormatSpec:
    return FormatSpec(
        name="nvfp4",
        summary="E2M1, one E4M3 scale for 16 along the contraction or for 16x16, one fp32 amax",
        quantizer="lpq_nvfp4.quantizer:NVFP4Quantizer",
        storage="lpq_nvfp4.storage:NVFP4Storage",
        effective_bits=4.5,
        kernels=KERNELS,
        schemes="lpq_nvfp4.engines:SCHEMES",
    )


# Only column operands are rotated, and they are wgrad's: so one quantizer serves a tensor in both its products.
X = "nvfp4(rht=true)"
W = "nvfp4(block=16x16)"
DY = "nvfp4(rht=true, stochastic=true)"
ROW_X = "nvfp4(scaling=row)"
DECODED = "hybrid(row={}, col=identity, col_source=row)"
EDEN_DY = "nvfp4(stochastic=eden)"
EDEN_OF_CODES = "hybrid(row=nvfp4(search=four_over_six, norm=256), col={}, col_source=row)"
LATE_DY = "nvfp4(stochastic=eden, scaling=delayed)"
BETTER_X = "nvfp4(rht=true, search=four_over_six, norm=256)"
BETTER_W = "nvfp4(block=16x16, search=four_over_six, norm=256)"


def _of(x: str, w: str) -> dict[str, dict[str, str]]:
    return {"fprop": {"x": x, "w": w}, "dgrad": {"dy": DY, "w": w}, "wgrad": {"dy": DY, "x": x}}


@hookimpl
def lpq_register_recipes() -> list[RecipeSpec]:
    return [
        RecipeSpec(
            name="nvfp4",
            summary="NVFP4 for all three products: 16x16 weights, rotated wgrad operands, stochastic dy",
            recipe=_of(X, W),
            aliases=("NVFP4BlockScaling",),
        ),
        RecipeSpec(
            name="nvfp4-four-over-six",
            summary="as nvfp4, each block of x and w with the better of two scales",
            recipe=_of(BETTER_X, BETTER_W),
        ),
        RecipeSpec(
            name="nvfp4-eden",
            summary="NVFP4 forward with the better of two scales; MS-EDEN backward, of what forward's codes decode to",
            recipe=f"x={EDEN_OF_CODES.format(EDEN_DY)}, w={EDEN_OF_CODES.format(EDEN_DY)}, dy={EDEN_DY}",
        ),
        RecipeSpec(
            name="nvfp4-eden-delayed",
            summary="as nvfp4-eden, x and dy of backward with the amax of the step before",
            recipe=f"x={EDEN_OF_CODES.format(LATE_DY)}, w={EDEN_OF_CODES.format(EDEN_DY)}, dy={LATE_DY}",
        ),
        RecipeSpec(
            name="nvfp4-fwd-mxfp8-bwd",
            summary="NVFP4 forward, MXFP8 in both gradient products",
            recipe="fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8",
        ),
        RecipeSpec(
            name="nvfp4-row-fwd-mxfp8-bwd",
            summary="NVFP4 forward, with an amax for each row of x; MXFP8 in both gradient products",
            recipe={"fprop": {"x": ROW_X, "w": "nvfp4"}, "dgrad": "mxfp8", "wgrad": "mxfp8"},
        ),
        RecipeSpec(
            name="nvfp4-row-fwd-decoded-bwd",
            summary="the same forward; gradients in bf16, of what x and w were rounded to",
            recipe=f"x={DECODED.format(ROW_X)}, w={DECODED.format('nvfp4')}, dy=bf16",
        ),
        RecipeSpec(
            name="nvfp4-fwd-bf16-bwd",
            summary="NVFP4 forward, bf16 gradients",
            recipe="fprop=nvfp4, dgrad=bf16, wgrad=bf16",
        ),
    ]
