"""cuBLASLt's product of bf16 matrices with a factor that lies on the device, which torch does not offer.

The sums are multiplied in fp32 and rounded once, at no cost, where a second pass would read and write all of them. The
library is the one that torch has loaded. What describes a product of some sizes is made once and kept.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any, cast

import torch
from torch import Tensor

from lpq.kernels.errors import KernelError
from lpq.kernels.fresh import allocator, fresh
from lpq.torch_private import cuda as torch_cuda

BF16, FP32 = 14, 0
TYPES = {torch.bfloat16: BF16, torch.float32: FP32}
"""What a product may be made of, and their codes."""
COMPUTE_FP32 = 68
POINTERS, TRANSPOSE_FIRST, EPILOGUE, BIAS = 2, 3, 7, 8
ON_DEVICE, TRANSPOSED, ADD_BIAS = 1, 1, 4
WORKSPACE_BYTES, REDUCTIONS, ALIGNMENT_FIRST, ALIGNMENT_SECOND = 1, 3, 5, 6
IN_FP32 = 2
"""Of reductions of partial sums: never in the dtype of the result."""
WORKSPACE = 32 << 20
ALIGNED = 256
"""To how many bytes cuBLASLt takes matrices to be aligned unless it is told. What torch allocates is; a view need not
be."""


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", ctypes.c_float),
        ("reserved", c_int * 4),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """cuBLASLt, if torch came with it."""
    version: str | None = getattr(torch.version, "cuda", None)
    try:
        return ctypes.CDLL(f"libcublasLt.so.{version.split('.')[0]}") if version else None
    except OSError:
        return None


def bind(
    device: torch.device, rows: int, cols: int, inner: int, dtype: torch.dtype, bias: bool, *, dispatched: bool = False
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """What multiplies matrices of these sizes: ``scalars[0] · left @ rightᵀ + bias`` of ``left``, ``right``,
    ``scalars`` and the bias, as bf16 or fp32. ``scalars[1]`` is 0, and the bias is of ``dtype``. The device is the
    current one; ``dispatched`` as for ``allocator``."""
    index, empty = device.index or 0, allocator(device, dispatched=dispatched)
    of, out_of = (index, rows, cols, inner, dtype, bias), fresh((rows, cols), dtype)
    usual = _plan(*of, ALIGNED)

    def multiply(left: Tensor, right: Tensor, scalars: Tensor, bias: Tensor | None) -> Tensor:
        first, second = left.data_ptr(), right.data_ptr()
        ends = first | second | ALIGNED
        plan = usual if ends & -ends == ALIGNED else _plan(*of, ends & -ends)
        out = empty(*out_of)
        workspace = empty((plan.workspace,), (1,), torch.uint8)
        plan.run(
            first, second, scalars.data_ptr(), bias.data_ptr() if bias is not None else None, out.data_ptr(),
            workspace.data_ptr(),
        )  # fmt: skip
        return out

    return multiply


class _Plan:
    """A product of some sizes. To cuBLASLt matrices are column after column, so it makes ``outᵀ = right @ leftᵀ``."""

    def __init__(
        self, index: int, rows: int, cols: int, inner: int, dtype: torch.dtype, bias: bool, aligned: int
    ) -> None:
        """Both operands are ``aligned`` to so many bytes, a power of two up to ``ALIGNED``."""
        self._lock = threading.Lock()
        self._index, self._handle = index, _handle(index)
        handle = self._handle
        self._matmul = _matmul()
        self._made: list[tuple[str, c_void_p]] = []
        weakref.finalize(self, _destroy, self._made).atexit = False
        self._description = self._make("MatmulDesc", COMPUTE_FP32, FP32)
        self._set("MatmulDesc", self._description, POINTERS, ON_DEVICE)
        self._set("MatmulDesc", self._description, TRANSPOSE_FIRST, TRANSPOSED)
        if bias:
            self._set("MatmulDesc", self._description, EPILOGUE, ADD_BIAS)
        right = self._matrix(BF16, inner, cols)
        left = self._matrix(BF16, inner, rows)
        out = self._matrix(TYPES[dtype], cols, rows)
        self._layouts = right, left, out
        wanted = self._make("MatmulPreference")
        self._set("MatmulPreference", wanted, WORKSPACE_BYTES, c_size_t(WORKSPACE))
        self._set("MatmulPreference", wanted, REDUCTIONS, IN_FP32)
        self._set("MatmulPreference", wanted, ALIGNMENT_FIRST, aligned)
        self._set("MatmulPreference", wanted, ALIGNMENT_SECOND, aligned)
        self._heuristic = _Heuristic()
        found = c_int()
        _call(
            "MatmulAlgoGetHeuristic", handle, self._description, right, left, out, out, wanted,
            c_int(1), byref(self._heuristic), byref(found),
        )  # fmt: skip
        if not found.value or self._heuristic.status:
            raise KernelError(
                f"cuBLASLt has no product of {rows}x{inner} and {cols}x{inner} in bf16, aligned to {aligned} bytes"
            )
        self.workspace = self._heuristic.workspace
        self._algorithm = ctypes.addressof(self._heuristic)

    def run(self, left: int, right: int, alpha: int, bias: int | None, out: int, workspace: int) -> None:
        """Multiply what lies at these addresses. ``alpha`` is that of the factor, after which a zero lies."""
        first, second, result = self._layouts
        stream = torch_cuda.current_stream(self._index)
        with self._lock:
            if bias is not None:
                self._set("MatmulDesc", self._description, BIAS, c_void_p(bias))
            status = self._matmul(
                self._handle, self._description, alpha, right, first, left, second, alpha + 4, out, result, out,
                result, self._algorithm, workspace, self.workspace, stream,
            )  # fmt: skip
        if status:
            raise KernelError(f"cublasLtMatmul failed with status {status}")

    def _matrix(self, dtype: int, rows: int, cols: int) -> c_void_p:
        """A matrix whose columns lie one after the other."""
        return self._make("MatrixLayout", dtype, ctypes.c_uint64(rows), ctypes.c_uint64(cols), ctypes.c_int64(rows))

    def _make(self, kind: str, *arguments: Any) -> c_void_p:
        made = c_void_p()
        _call(f"{kind}Create", byref(made), *arguments)
        self._made.append((kind, made))
        return made

    def _set(self, kind: str, of: c_void_p, attribute: int, value: Any) -> None:
        held = c_int(value) if isinstance(value, int) else value
        _call(f"{kind}SetAttribute", of, attribute, byref(held), c_size_t(ctypes.sizeof(held)))


def _destroy(made: list[tuple[str, c_void_p]]) -> None:
    for kind, each in made:
        _call(f"{kind}Destroy", each)


@functools.lru_cache(maxsize=1024)
def _plan(index: int, rows: int, cols: int, inner: int, dtype: torch.dtype, bias: bool, aligned: int) -> _Plan:
    with torch.cuda.device(index):
        return _Plan(index, rows, cols, inner, dtype, bias, aligned)


@functools.cache
def _matmul() -> Callable[..., int]:
    """The product itself, which takes addresses as they are."""
    call: Any = library().cublasLtMatmul  # type: ignore[union-attr]
    call.argtypes, call.restype = [*[c_void_p] * 14, c_size_t, c_void_p], c_int
    return cast("Callable[..., int]", call)


@functools.cache
def _handle(index: int) -> c_void_p:
    """What cuBLASLt knows of a device; it serves all threads."""
    handle = c_void_p()
    with torch.cuda.device(index):
        _call("Create", byref(handle))
    return handle


def _call(name: str, *arguments: Any) -> None:
    status: int = getattr(library(), f"cublasLt{name}")(*arguments)
    if status:
        raise KernelError(f"cublasLt{name} failed with status {status}")
