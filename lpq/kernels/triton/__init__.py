"""The common parts of Triton kernels: numbers, tiles, and kernels that belong to no format.

Triton serves any GPU that it compiles for, whether or not the kernels in CUDA C++ do. So these kernels are few and
simple. bf16 and the 8-bit and 4-bit floats are converted by integer and fp32 arithmetic that is exact everywhere, and
bf16 and 8-bit floats by one instruction on the GPUs of NVIDIA that have it.
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
