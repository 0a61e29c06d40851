"""Descriptions of matrices for Hopper's copy engine, which fetches tiles of them: ``TensorMap`` of ``hopper.cuh``."""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any, cast

from lpq.kernels.errors import KernelError

LETTERS = f"({'P' * 16})"
"""The letters of a map among the letters of a ``CudaKernel``."""
MAP, MAP_ALIGNED = struct.Struct("<16Q"), 64
BYTES, NO_INTERLEAVE, SWIZZLED_128, FETCHED_256, ZEROS = 0, 0, 3, 3, 0
"""The driver's codes: of 8-bit elements, how lines lie in shared memory, what is fetched at a time, what is outside."""


@functools.lru_cache(maxsize=256)
def of_bytes(address: int, rows: int, columns: int, pitch: int, high: int, wide: int) -> tuple[int, ...]:
    """The map of a matrix of 8-bit elements whose rows are ``pitch`` bytes apart, for tiles ``[high, wide]``.

    ``wide`` is 128; raise ``KernelError`` where the driver refuses it.
    """
    room = ctypes.create_string_buffer(MAP.size + MAP_ALIGNED)
    skipped = -ctypes.addressof(room) % MAP_ALIGNED
    sizes, apart = (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(pitch)
    box, steps = (ctypes.c_uint32 * 2)(wide, high), (ctypes.c_uint32 * 2)(1, 1)
    status = _encode()(
        ctypes.addressof(room) + skipped, BYTES, 2, address, sizes, apart, box, steps, NO_INTERLEAVE, SWIZZLED_128,
        FETCHED_256, ZEROS,
    )  # fmt: skip
    if status != 0:
        raise KernelError(
            f"the driver does not describe a matrix [{rows}, {columns}] of bytes, rows {pitch} apart, at {address:#x}, "
            f"for tiles [{high}, {wide}]: CUDA error {status}"
        )
    return MAP.unpack_from(room, skipped)


@functools.cache
def _encode() -> Any:
    call: Any = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_int
    call.argtypes = [pointer, number, ctypes.c_uint32, pointer, *[pointer] * 4, *[number] * 4]
    call.restype = number
    return cast("Any", call)
