"""Products of formats that the hardware does not multiply, and operands of two formats from one read.

They serve every format that declares how, and come in as a plugin like any other. It names no format: it registers for
``ANY`` two.
"""

from lpq.registry import ANY, KernelSpec, hookimpl

PAIR = (ANY, ANY)


@hookimpl
def lpq_register_kernels() -> list[KernelSpec]:
    fused, gemm = "lpq.operations.fused_pair", "lpq.emulation.bf16_gemm"
    return [
        KernelSpec(
            op="gemm", impl=f"{gemm}:gemm_with_alpha", bind=f"{gemm}:bind_with_alpha",
            why_not=f"{gemm}:why_not_alpha", backend="cuda", formats=PAIR, min_sm=80, requires=("cuda.core",),
        ),
        KernelSpec(
            op="gemm", impl=f"{gemm}:gemm", bind=f"{gemm}:bind", why_not=f"{gemm}:why_not", backend="torch",
            formats=PAIR, min_sm=80,
        ),
        KernelSpec(
            op="quantize", impl=f"{fused}:quantize", bind=f"{fused}:bind", why_not=f"{fused}:why_not", backend="cuda",
            formats=PAIR, min_sm=80, requires=("cuda.core",), priority=15,
        ),
    ]  # fmt: skip
