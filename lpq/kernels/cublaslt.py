"""cuBLASLt's products, by calls from lpq to the library that torch has loaded.

There are two kinds. One multiplies bf16 matrices with a factor that lies on the device, which torch does not offer: the
sums are multiplied in fp32 and rounded once, at no cost, where a second pass would read and write all of them. The
other multiplies 8-bit matrices with scales, as torch's scaled matmul does. torch describes the product anew and
requests an algorithm at each call, which takes the host time; here the description is made once for each set of sizes,
and kept.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lpq.kernels import native
from lpq.kernels.errors import KernelError
from lpq.kernels.fresh import allocator, fresh
from lpq.torch_private import cuda as torch_cuda

FP32 = 0
TYPES = {
    torch.float32: FP32, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29,
}  # fmt: skip
"""The dtypes of operands and results, and cuBLASLt's codes for them."""
COMPUTE_FP32 = 68
POINTERS, TRANSPOSE_FIRST, EPILOGUE, BIAS = 2, 3, 7, 8
FIRST_SCALES, SECOND_SCALES, FAST, FIRST_SCALED, SECOND_SCALED = 17, 18, 25, 31, 32
ON_DEVICE, TRANSPOSED, ADD_BIAS = 1, 1, 4
OF_ALL, OF_ROWS, OF_1X128, OF_128X128 = 0, 3, 4, 5
"""The parts of a matrix that have one scale each: the whole matrix, each row, or blocks."""
WORKSPACE_BYTES, REDUCTIONS, ALIGNMENT_FIRST, ALIGNMENT_SECOND = 1, 3, 5, 6
IN_FP32 = 2
"""How partial sums are reduced: never in the dtype of the result."""
WORKSPACE = 32 << 20
ALIGNED = 256
"""The alignment of matrices, in bytes, that cuBLASLt assumes unless another is set. Memory that torch allocates has it;
a view need not."""


SCALED_ALIGNED = 16
"""The alignment in bytes that 8-bit matrices need."""
ONE_AND_ZERO = (ctypes.c_float * 2)(1.0, 0.0)
"""The factor of the product, and the factor of the matrix that it is added to."""
ONE = ctypes.addressof(ONE_AND_ZERO)


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
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]:
    """Bind ``scalars[0] · left @ rightᵀ + bias`` to these sizes. The function takes ``left``, ``right``, ``scalars``,
    the bias and the matrix to write to (None: a new one), which begins at a multiple of ``ALIGNED``, and returns the
    product in ``dtype``, bf16 or fp32, which is the bias's dtype too. ``scalars[1]`` is 0. The device is the current
    one; ``dispatched`` as for ``allocator``."""
    how = _How(device.index or 0, rows, cols, inner, dtype, bias=bias)
    return cast("Callable[..., Tensor]", _bind(how, device, dispatched))


def bind_scaled(
    device: torch.device, rows: int, cols: int, inner: int, types: tuple[torch.dtype, torch.dtype], dtype: torch.dtype,
    scaled: tuple[int, int], fast: bool, *, dispatched: bool = False,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor | None] | None:  # fmt: skip
    """Bind ``left @ rightᵀ`` to 8-bit matrices of these sizes and ``types``, by the algorithm that torch's scaled
    matmul takes. The function takes ``left``, ``right``, the scales of both and the matrix to write to, as for
    ``bind``, and returns the product in ``dtype``, or None where an operand is not contiguous or not aligned.
    ``scaled`` names the parts of either side that have a scale, ``fast`` allows sums in less than fp32; ``dispatched``
    is as in ``allocator``. The device is the current one. Return None if this cuBLASLt has no such product.
    """
    if library() is None or dtype not in TYPES:
        return None
    how = _How(device.index or 0, rows, cols, inner, dtype, types=types, scaled=scaled, fast=fast)
    try:
        return _bind(how, device, dispatched)
    except KernelError:  # an older library has no such scales
        return None


def _bind(how: _How, device: torch.device, dispatched: bool) -> Callable[..., Tensor | None]:
    """Bind a product. The function takes both matrices; the factor and the bias, or the scales of both matrices; and
    the matrix to write to."""
    usual, scaled = _plan(how), how.scaled is not None
    empty, out_of = allocator(device, dispatched=dispatched), fresh((how.rows, how.cols), how.dtype)

    def multiply(
        left: Tensor, right: Tensor, factor: Tensor, beside: Tensor | None, out: Tensor | None
    ) -> Tensor | None:
        first, second = left.data_ptr(), right.data_ptr()
        ends = first | second | ALIGNED
        ends &= -ends
        if scaled and (ends < SCALED_ALIGNED or not (left.is_contiguous() and right.is_contiguous())):
            return None
        plan = usual if ends == ALIGNED else _plan(how._replace(aligned=ends))
        out = empty(*out_of) if out is None else out
        workspace = empty(*plan.workspace) if plan.workspace else None
        status = (plan.in_c or plan.run)(
            first, second, factor.data_ptr(), beside.data_ptr() if beside is not None else 0, out.data_ptr(),
            workspace.data_ptr() if workspace is not None else 0,
        )  # fmt: skip
        if status:
            raise KernelError(f"cublasLtMatmul failed with status {status}")
        return out

    return multiply


class _How(NamedTuple):
    """A product of some sizes."""

    device: int
    rows: int
    cols: int
    inner: int
    dtype: torch.dtype
    """The dtype of the result."""
    types: tuple[torch.dtype, torch.dtype] = (torch.bfloat16, torch.bfloat16)
    """The dtypes of the operands."""
    bias: bool = False
    scaled: tuple[int, int] | None = None
    """The parts of either operand that have a scale; None: none has, and the product has a factor on the device."""
    fast: bool = False
    aligned: int = ALIGNED
    """The alignment of both operands in bytes, a power of two up to ``ALIGNED``."""


class _Plan:
    """A product of some sizes. To cuBLASLt matrices are column after column, so it makes ``outᵀ = right @ leftᵀ``."""

    def __init__(self, how: _How) -> None:
        index, rows, cols, inner, dtype, types, bias, scaled, fast, aligned = how
        self._lock = threading.Lock()
        self._index, self._handle = index, _handle(index)
        handle = self._handle
        self._matmul = _matmul()
        self._made: list[tuple[str, c_void_p]] = []
        _destroy_what_is_left()
        _DESCRIPTIONS.append((weakref.ref(self), self._made))
        self._description = self._make("MatmulDesc", COMPUTE_FP32, FP32)
        describe = functools.partial(self._set, "MatmulDesc", self._description)
        describe(TRANSPOSE_FIRST, TRANSPOSED)
        if bias:
            describe(EPILOGUE, ADD_BIAS)
        wanted = self._make("MatmulPreference")
        prefer = functools.partial(self._set, "MatmulPreference", wanted)
        prefer(WORKSPACE_BYTES, c_size_t(WORKSPACE))
        self._scales: tuple[c_void_p, c_void_p] | tuple[()] = ()
        if scaled is None:
            describe(POINTERS, ON_DEVICE)
            prefer(REDUCTIONS, IN_FP32)
        else:
            describe(FAST, ctypes.c_int8(fast))
            if scaled != (OF_ALL, OF_ALL):  # attributes that older libraries lack
                describe(FIRST_SCALED, scaled[1])
                describe(SECOND_SCALED, scaled[0])
            self._scales = c_void_p(ALIGNED), c_void_p(ALIGNED)  # an algorithm is found for scales that are somewhere
            self._set_scales = [
                functools.partial(_attribute(), self._description, attribute, ctypes.addressof(value), 8)
                for attribute, value in zip((FIRST_SCALES, SECOND_SCALES), self._scales, strict=True)
            ]
            for set_scale in self._set_scales:
                set_scale()
        if scaled is None or aligned != ALIGNED:
            prefer(ALIGNMENT_FIRST, aligned)
            prefer(ALIGNMENT_SECOND, aligned)
        right = self._matrix(TYPES[types[1]], inner, cols)
        left = self._matrix(TYPES[types[0]], inner, rows)
        out = self._matrix(TYPES[dtype], cols, rows)
        self._layouts = right, left, out
        self._heuristic = _Heuristic()
        found = c_int()
        _call(
            "MatmulAlgoGetHeuristic", handle, self._description, right, left, out, out, wanted,
            c_int(1), byref(self._heuristic), byref(found),
        )  # fmt: skip
        if not found.value or self._heuristic.status:
            raise KernelError(
                f"cuBLASLt has no product of {rows}x{inner} and {cols}x{inner} in {' and '.join(map(str, types))}, "
                f"aligned to {aligned} bytes"
            )
        self._bytes = self._heuristic.workspace
        self.workspace = fresh((self._bytes,), torch.uint8) if self._bytes else None
        """The workspace that it needs, in bytes."""
        self._algorithm = ctypes.addressof(self._heuristic)
        self.in_c = self._in_c(scaled is not None)
        """``run`` from C, if C can be compiled here."""

    def run(self, left: int, right: int, alpha: int, bias: int, out: int, workspace: int) -> int:
        """Multiply the matrices at these addresses, and return a status. ``alpha`` is the address of the factor, which
        a zero follows; ``bias`` is 0 if there is none. If the matrices have scales, the addresses of the scales of left
        and right are in the place of both."""
        first, second, result = self._layouts
        with self._lock:
            if self._scales:
                (of_first, of_second), of_left, of_right = self._scales, alpha, bias
                of_first.value, of_second.value, alpha = of_right, of_left, ONE
                for set_scale in self._set_scales:
                    set_scale()
            elif bias:
                self._set("MatmulDesc", self._description, BIAS, c_void_p(bias))
            return self._matmul(
                self._handle, self._description, alpha, right, first, left, second, alpha + 4, out, result, out, result,
                self._algorithm, workspace, self._bytes, torch_cuda.current_stream(self._index),
            )  # fmt: skip

    def _in_c(self, scaled: bool) -> Callable[[int, int, int, int, int, int], int] | None:
        matmul, attribute = native.address_of(self._matmul), native.address_of(_attribute())
        if matmul is None or attribute is None or (calls := native.calls()) is None:
            return None
        described = (part.value for part in (self._handle, self._description, *self._layouts))
        made: Callable[[int, int, int, int, int, int], int] = calls.Product(
            matmul, attribute, *described, self._algorithm, self._bytes, FIRST_SCALES if scaled else 0, SECOND_SCALES,
            BIAS, self._index, torch_cuda.current_stream,
        )  # fmt: skip
        return made

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


_DESCRIPTIONS: list[tuple[weakref.ref[_Plan], list[tuple[str, c_void_p]]]] = []
"""The descriptions that plans made in the library, until they are destroyed."""


def _destroy_what_is_left() -> None:
    """Destroy the descriptions of plans that are gone. No function is called when one goes: an interrupt that came
    there would be lost."""
    for known in [*_DESCRIPTIONS]:
        plan, made = known
        if plan() is None:
            with suppress(ValueError):  # another thread has it
                _DESCRIPTIONS.remove(known)
                for kind, each in made:
                    _call(f"{kind}Destroy", each)


@functools.lru_cache(maxsize=1024)
def _plan(how: _How) -> _Plan:
    with torch.cuda.device(how.device):
        return _Plan(how)


@functools.cache
def _matmul() -> Callable[..., int]:
    """Return cuBLASLt's function for a product, which takes addresses as they are."""
    call: Any = library().cublasLtMatmul  # type: ignore[union-attr]
    call.argtypes, call.restype = [*[c_void_p] * 14, c_size_t, c_void_p], c_int
    return cast("Callable[..., int]", call)


@functools.cache
def _attribute() -> Callable[..., int]:
    """Return the function that sets an attribute of a product, for attributes that change at each call."""
    call: Any = library().cublasLtMatmulDescSetAttribute  # type: ignore[union-attr]
    call.argtypes, call.restype = [c_void_p, c_int, c_void_p, c_size_t], c_int
    return cast("Callable[..., int]", call)


@functools.cache
def _handle(index: int) -> c_void_p:
    """cuBLASLt's handle of a device; it serves all threads."""
    handle = c_void_p()
    with torch.cuda.device(index):
        _call("Create", byref(handle))
    return handle


def _call(name: str, *arguments: Any) -> None:
    status: int = getattr(library(), f"cublasLt{name}")(*arguments)
    if status:
        raise KernelError(f"cublasLt{name} failed with status {status}")
