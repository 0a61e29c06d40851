"""The quantizers that the core is tested with: every built-in format, with the options that change its layout."""

QUANTIZERS = [
    "fp8",
    "fp8(dtype=e5m2, pow2=true)",
    "fp8(scaling=delayed, history=4)",
    "fp8(scaling=row)",
    "fp8(scaling=block)",
    "fp8(scaling=block, block=128x128)",
    "mxfp8",
    "mxfp4",
    "mxfp4(scale=ceil, rht=true, stochastic=true)",
    "nvfp4",
    "nvfp4(block=16x16)",
    "nvfp4(rht=true)",
    "nvfp4(rht=true, stochastic=true)",
    "identity",
    "identity(dtype=bfloat16)",
    "hybrid(row=mxfp8, col=nvfp4(rht=true))",
    "hybrid(row=fp8, col=fp8(dtype=e5m2))",
    "hybrid(row=nvfp4, col=mxfp8, col_source=row)",
]
KINDS = [
    "fp8",  # one scale for the whole tensor
    "fp8(scaling=delayed, history=4)",  # and state
    "fp8(scaling=block, block=128x128)",  # blocks of rows and columns
    "mxfp8",  # blocks of columns
    "nvfp4(rht=true, stochastic=true)",  # both kinds of scales, rotated, rounded at random
    "identity(dtype=bfloat16)",  # no scales
    "hybrid(row=nvfp4, col=mxfp8, col_source=row)",  # two formats, one encoding what the other decodes to
]
"""One of each kind, for what depends on no format: the conformance kit asks the rest of every one."""
IN_KERNELS = [
    "fp8",
    "fp8(dtype=e5m2, pow2=true)",
    "fp8(scaling=delayed)",
    "fp8(scaling=row)",
    "fp8(scaling=row, dtype=e5m2, pow2=true)",
    "fp8(scaling=block)",
    "fp8(scaling=block, pow2=false, dtype=e5m2)",
    "fp8(scaling=block, block=128x128)",
    "mxfp8",
    "hybrid(row=mxfp8, col=mxfp8(dtype=e5m2))",
    "mxfp4",
    "mxfp4(scale=even, rht=true)",
    "mxfp4(scale=ceil, stochastic=true)",
    "mxfp4(scale=ceil, rht=true, stochastic=true)",
    "nvfp4",
    "nvfp4(block=16x16)",
    "nvfp4(stochastic=true)",
    "nvfp4(stochastic=unbiased)",
    "nvfp4(rht=true)",
    "nvfp4(rht=true, stochastic=true)",
    "nvfp4(rht=true, stochastic=unbiased)",
    "nvfp4(block=16x16, stochastic=true)",
    "nvfp4(block=16x16, stochastic=unbiased)",
    "nvfp4(block=16x16, rht=true)",
    "nvfp4(search=four_over_six)",
    "nvfp4(search=four_over_six, error=mae, norm=256)",
    "nvfp4(rht=true, search=four_over_six, norm=256)",
    "nvfp4(block=16x16, search=four_over_six, norm=256)",
    "nvfp4(block=16x16, search=four_over_six, error=mae)",
    "nvfp4(scaling=row)",
    "nvfp4(scaling=row, stochastic=unbiased)",
    "nvfp4(scaling=row, search=four_over_six, norm=256)",
]
"""Those for which the kernels that encode take different ways."""
SIDES = [(True, False), (False, True), (True, True)]
