"""FP8: 8-bit floats with fp32 scales: one for the tensor, for each row, or for each block."""

from lpq.registry import FormatSpec, KernelSpec, LayoutSpec, RecipeSpec, hookimpl

CUDA = "lpq_fp8.cuda"
OF_ROW = "hybrid(row=fp8(scaling=block), col=fp8(scaling=block), col_source=row)"
IN_16S = "contraction and columns in multiples of 16; other sizes are multiplied in bf16"
KERNELS = (
    KernelSpec.cuda(
        "quantize", f"{CUDA}:quantize", bind=f"{CUDA}:bind", several="lpq_fp8.several:bind", why_not=f"{CUDA}:why_not",
        rounds=True,
    ),
    KernelSpec.cuda("measure", f"{CUDA}:measure", why_not=f"{CUDA}:why_not", rounds=True),
    KernelSpec.cuda(
        "transpose", "lpq_fp8.views:transpose", bind="lpq_fp8.views:bind_transpose",
        several="lpq_fp8.views:bind_transposes",
    ),
    KernelSpec.cuda("decode", "lpq_fp8.views:decode"),
    KernelSpec.cuda("tile", "lpq_fp8.tile:tile"),
    KernelSpec.cuda("reader", "lpq_fp8.views:reader"),
    KernelSpec.cuda(
        "remember", "lpq_fp8.history:remember", bind="lpq_fp8.history:bind", why_not="lpq_fp8.history:why_not"
    ),
    *(
        KernelSpec.triton(op, f"lpq_fp8.triton:{op}")
        for op in ("measure", "quantize", "decode", "transpose", "stored_tile", "tile_program")
    ),
    KernelSpec(
        op="gemm", impl="lpq_fp8.gemm:gemm", bind="lpq_fp8.gemm:bind", why_not="lpq_fp8.gemm:why_not",
        formats=("fp8", "fp8"), backend="torch", min_sm=89, priority=10, note=IN_16S,
    ),
    KernelSpec(  # of cuBLAS, on Hopper alone
        op="gemm", impl="lpq_fp8.gemm:gemm_of_blocks", bind="lpq_fp8.gemm:bind_blocks",
        why_not="lpq_fp8.gemm:blocks_why_not", formats=("fp8", "fp8"), backend="torch", min_sm=90, max_sm=90,
        priority=10, note=f"{IN_16S}, as are blocks of 1x128 unless the rows are a multiple of 4",
    ),
    KernelSpec(
        op="grouped_gemm", impl="lpq_fp8.groups:grouped_gemm", why_not="lpq_fp8.groups:why_not", backend="torch",
        min_sm=90, max_sm=100, note="for rows in groups; contraction and columns in multiples of 16",
    ),
    KernelSpec.cuda(
        "grouped_gemm", "lpq_fp8.groups_hopper:grouped_gemm", bind="lpq_fp8.groups_hopper:bind",
        why_not="lpq_fp8.groups_hopper:why_not", min_sm=90, max_sm=90,
        note="for rows in groups; contraction and columns in multiples of 16",
    ),
    KernelSpec(op="exact", impl="lpq_fp8.gemm:exact", why_not="lpq_fp8.gemm:exact_why_not", backend="torch", min_sm=80),
)  # fmt: skip


@hookimpl
def lpq_register_formats() -> FormatSpec:
    return FormatSpec(
        name="fp8",
        summary="E4M3 or E5M2, fp32 scales: one for the tensor (current, delayed), each row or each block",
        quantizer="lpq_fp8.quantizer:FP8Quantizer",
        storage="lpq_fp8.storage:FP8Storage",
        effective_bits=8,
        kernels=KERNELS,
        schemes="lpq_fp8.engines:SCHEMES",
    )


@hookimpl
def lpq_register_layouts() -> LayoutSpec:
    return LayoutSpec(
        name="fp8-block",
        summary="DeepSeek's, which transformers calls fp8: weight_scale_inv",
        layout="lpq_fp8.engines:FineGrained",
    )


@hookimpl
def lpq_register_recipes() -> list[RecipeSpec]:
    return [
        RecipeSpec(
            name="fp8-current",
            summary="FP8, one scale for each tensor, from the tensor itself; gradients in E5M2",
            recipe="x=fp8(), w=fp8(), dy=fp8(dtype=e5m2), w.save=weight",
            aliases=("tensorwise", "Float8CurrentScaling"),
        ),
        RecipeSpec(
            name="fp8-delayed",
            summary="FP8, one scale for each tensor, from earlier steps; gradients in E5M2",
            recipe="x=fp8(scaling=delayed), w=fp8(scaling=delayed), dy=fp8(scaling=delayed, dtype=e5m2)",
            aliases=("DelayedScaling",),
        ),
        RecipeSpec(
            name="fp8-row",
            summary="FP8, one scale for each row of each operand",
            recipe="fp8(scaling=row)",
            aliases=("rowwise",),
        ),
        RecipeSpec(
            name="fp8-row-bf16-wgrad",
            summary="FP8 with one scale for each row; the gradient of the weight in bf16",
            recipe="fprop=fp8-row, dgrad=fp8-row, wgrad=bf16",
            aliases=("rowwise_with_gw_hp",),
        ),
        RecipeSpec(
            name="fp8-block",
            summary="FP8, power-of-two scales for blocks of 128, in weights of 128x128",
            recipe="x=fp8(scaling=block), w=fp8(scaling=block, block=128x128), dy=fp8(scaling=block)",
            aliases=("blockwise", "Float8BlockScaling"),
        ),
        RecipeSpec(
            name="fp8-block-one-copy",
            summary="as fp8-block, each column operand made of the row operand, the one that is kept and sent",
            recipe=f"x={OF_ROW}, w=fp8(scaling=block, block=128x128), dy={OF_ROW}",
        ),
    ]
