"""Every kernel that can run here equals the reference bit for bit, whatever its outputs held before."""

from __future__ import annotations

import dataclasses
import os
import warnings

import pytest
import torch

from lpq import registry
from lpq.formats import Quantizer
from lpq.kernels.table import BACKENDS, ENVIRONMENT, why_not
from lpq.operations.kernel_protocols import protocols_of, unfit
from lpq.registry import KernelSpec
from lpq.registry.errors import ImportStringError, words
from lpq.registry.operations import TABLE
from lpq.testing.calls import SHAPES, SIZES, matrices
from lpq.testing.comparing import compare_rounded
from lpq.testing.expect import there
from lpq.testing.kernel_checks import CHECKS, check_of, compare, compare_views, pairs
from lpq.testing.operands import normal
from lpq.testing.options import Family, only
from lpq.testing.table import DTYPES

FEW, MANY = 1 << 14, 1 << 20
"""The largest number of elements of a matrix; it is smaller where Triton's interpreter takes seconds for the work of a
moment on a GPU."""
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def kernels(quantizer: Quantizer) -> list[KernelSpec]:
    """The kernels in the table that serve this format, on one side at least."""
    name = registry.format_of(type(quantizer)).name
    return [kernel for plugin in registry.plugins() for kernel in plugin.kernels if name in kernel.formats]


@only(lambda quantizer: bool(kernels(quantizer)), "has a kernel beside its reference")
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_equal_the_reference(family: Family, device: str) -> None:
    """For all options, awkward shapes, numbers of every kind, views, and with the default options every dtype; for one
    operand and both; a product up to the order of its sums.

    ``LPQ_KERNELS`` names the backends whose kernels are compared; unset, all are. With ``TRITON_INTERPRET=1``, by which
    Triton runs its kernels on a CPU, those are compared there. A kernel that was never compared is listed, with the
    reason."""
    own = served_on(device, family.default)
    if not own:
        elsewhere = ", as Triton interprets them on the CPU" if device == "cuda" and triton_interprets() else ""
        pytest.skip(f"{family} has no kernel for {device}{elsewhere}")
    if device == "cuda" and not torch.cuda.is_available():
        names = ", ".join(kernel.impl for kernel in own)
        pytest.skip(f"there is no CUDA device here for {names}")
    refusals: dict[str, str] = {}
    idle: dict[str, str] = {}
    served: set[str] = set()
    for kernel in own:
        check = check_of(kernel)
        for quantizer in family.quantizers:
            for row, col in pairs(kernel, quantizer):
                reason = refusal(kernel, tuple(side for side in (row, col) if side is not None), device)
                if reason is not None:
                    refusals[kernel.impl] = reason
                    continue
                dtypes = DTYPES if quantizer == family.default else DTYPES[:1]
                results = [
                    compare(kernel, row, col, x, device, name)
                    for name, x in matrices(dtypes, FEW if triton_interprets() else MANY)
                    if not check.sums or name != SIZES
                ]
                results.append(compare_views(kernel, row, col, device))
                if any(results):
                    served.add(kernel.impl)
                else:
                    idle[kernel.impl] = check.nothing
                if kernel.several is not None and row is not None:
                    there(check.several, f"the check of {kernel.op} of several")(kernel, row, SHAPES, device)
                if kernel.rounds:
                    for shape in SHAPES:
                        compare_rounded(kernel, row, col, normal(*shape), device, dtypes)
    no_pair = {kernel.impl: "no quantizer that was tried has operands for it" for kernel in own}
    unseen = [f"{impl}: {reason}" for impl, reason in (no_pair | refusals | idle).items() if impl not in served]
    if not served:
        pytest.skip("; ".join(unseen))
    for one in unseen:
        warnings.warn(f"not compared with the reference: {one}", stacklevel=1)


@only(lambda quantizer: bool(kernels(quantizer)), "has a kernel beside its reference")
def test_import_strings_of_kernels(family: Family) -> None:
    """``impl``, ``bind``, ``several`` and ``why_not`` name functions, of kernels for other hardware too, and take the
    arguments of the operation's Protocols; a module may lack what its kernel ``requires``."""
    for kernel in kernels(family.default):
        protocols = protocols_of(TABLE[kernel.op])
        for field in ("impl", "bind", "several", "why_not"):
            string = getattr(kernel, field)
            if string is None:
                continue
            try:
                function = registry.resolve(string)
            except ImportStringError as error:
                module = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
                if any(f"{requirement}.".startswith(f"{module}.") for requirement in kernel.requires):
                    continue
                raise
            assert callable(function), (
                f"the {kernel.op} kernel names {string!r}, which is {function!r} and cannot be called"
            )
            if field in protocols:
                fault = unfit(function, protocols[field], *(("dtype",) if kernel.rounds and field == "impl" else ()))
                assert fault is None, f"the {kernel.op} kernel names {string!r}: {fault}"


def triton_interprets() -> bool:
    """Whether ``TRITON_INTERPRET`` has Triton run its kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def served_on(device: str, quantizer: Quantizer) -> list[KernelSpec]:
    """The kernels with a check that this type of device runs for a format. The CPU runs those in Triton, where Triton
    interprets them."""
    candidates = kernels(quantizer)
    if triton_interprets():
        candidates = [dataclasses.replace(k, device="cpu") if k.backend == "triton" else k for k in candidates]
    return [kernel for kernel in candidates if kernel.device == device and CHECKS[kernel.op] is not None]


def refusal(kernel: KernelSpec, operands: tuple[Quantizer, ...], device: str) -> str | None:
    """Why a kernel is not compared for these operands; None: it is."""
    backends = {name.strip() for name in os.environ.get(ENVIRONMENT, "").split(",")} - {""}
    try:
        return why_not(kernel, operands, torch.device(device), frozenset(backends or BACKENDS))
    except Exception as error:
        if kernel.backend == "triton" and device == "cpu":  # it may read the GPU's properties, and there is no GPU
            return f"its why_not raised {words(error)}, where Triton interprets on a CPU"
        raise
