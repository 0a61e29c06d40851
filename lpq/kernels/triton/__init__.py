"""The common parts of Triton kernels: numbers, tiles, and kernels that belong to no format.

Triton serves any GPU that it compiles for, whether or not the kernels in CUDA C++ do. So these kernels are few and
simple. No conversion in them depends on an instruction of one GPU or on Triton's interpreter: bf16 and the 8-bit and
4-bit floats are converted by integer and fp32 arithmetic that is exact everywhere.
"""

from lpq.kernels.triton.kernels import (
    block_amaxes,
    empty_amaxes,
    keeping_small_numbers,
    launch,
    programs,
    transpose_bytes,
    transpose_nibbles,
)

__all__ = [
    "block_amaxes", "empty_amaxes", "keeping_small_numbers", "launch", "programs", "transpose_bytes",
    "transpose_nibbles",
]  # fmt: skip
