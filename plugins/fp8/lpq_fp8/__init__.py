"""FP8: 8-bit floats with fp32 scales: one for the tensor, for each row, or for each block."""

from lpq.registry import FormatSpec, KernelSpec, RecipeSpec, hookimpl

CUDA = "lpq_fp8.cuda"
TRITON = "lpq_fp8.triton"
KERNELS = (
    KernelSpec(
        op="quantize", impl=f"{CUDA}:quantize", why_not=f"{CUDA}:why_not",
        backend="cuda", min_sm=80, requires=("cuda.core",), priority=20, rounds=True,
    ),
    KernelSpec(
        op="measure", impl=f"{CUDA}:measure", why_not=f"{CUDA}:measure_why_not",
        backend="cuda", min_sm=80, requires=("cuda.core",), priority=20, rounds=True,
    ),
    KernelSpec(
        op="transpose", impl="lpq_fp8.views:transpose", why_not="lpq_fp8.views:transpose_why_not",
        backend="cuda", min_sm=80, requires=("cuda.core",), priority=20,
    ),
    KernelSpec(
        op="decode", impl="lpq_fp8.views:decode",
        backend="cuda", min_sm=80, requires=("cuda.core",), priority=20,
    ),
    KernelSpec(
        op="tile", impl="lpq_fp8.tile:tile",
        backend="cuda", min_sm=80, requires=("cuda.core",), priority=20,
    ),
    KernelSpec(
        op="remember", impl="lpq_fp8.history:remember", why_not="lpq_fp8.history:why_not",
        backend="cuda", min_sm=80, requires=("cuda.core",), priority=20,
    ),
    KernelSpec(
        op="cast", impl="lpq_fp8.cast:cast",
        backend="cuda", min_sm=80, requires=("cuda.core",), priority=20,
    ),
    *(
        KernelSpec(op=op, impl=f"{TRITON}:{op}", backend="triton", min_sm=75, requires=("triton",), priority=10)
        for op in ("measure", "quantize", "decode")
    ),
    KernelSpec(
        op="transpose", impl=f"{TRITON}:transpose", why_not=f"{TRITON}:transpose_why_not",
        backend="triton", min_sm=75, requires=("triton",), priority=10,
    ),
    KernelSpec(
        op="gemm", impl="lpq_fp8.gemm:gemm", why_not="lpq_fp8.gemm:why_not", formats=("fp8", "fp8"),
        backend="torch", min_sm=89, priority=10,
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
    )


@hookimpl
def lpq_register_recipes() -> list[RecipeSpec]:
    return [
        RecipeSpec(
            name="fp8-current",
            summary="FP8, one scale for each tensor, from the tensor itself; gradients in E5M2",
            recipe="x=fp8(), w=fp8(), dy=fp8(dtype=e5m2)",
        ),
        RecipeSpec(
            name="fp8-delayed",
            summary="FP8, one scale for each tensor, from earlier steps; gradients in E5M2",
            recipe="x=fp8(scaling=delayed), w=fp8(scaling=delayed), dy=fp8(scaling=delayed, dtype=e5m2)",
        ),
        RecipeSpec(
            name="fp8-row",
            summary="FP8, one scale for each row of each operand",
            recipe="fp8(scaling=row)",
        ),
        RecipeSpec(
            name="fp8-block",
            summary="FP8, power-of-two scales for blocks of 128, in weights of 128x128",
            recipe="x=fp8(scaling=block), w=fp8(scaling=block, block=128x128), dy=fp8(scaling=block)",
        ),
    ]
