"""Every kernel that can run here equals the reference bit for bit, whatever its outputs held before."""

from __future__ import annotations

import pytest
import torch

from lpq import registry
from lpq.operations.kernel_protocols import protocols_of, unfit
from lpq.registry import KernelSpec
from lpq.registry.errors import ImportStringError
from lpq.registry.operations import TABLE
from lpq.testing.calls import SHAPES, SIZES, matrices
from lpq.testing.comparing import compare_rounded
from lpq.testing.expect import there
from lpq.testing.kernel_checks import check_of, kernels, pairs, refusal, triton_interprets
from lpq.testing.operands import normal
from lpq.testing.options import Family, only
from lpq.testing.table import DTYPES

FEW, MANY = 1 << 14, 1 << 20
"""The largest number of elements of a matrix; it is smaller where Triton's interpreter takes seconds for the work of a
moment on a GPU."""


def test_kernels_equal_the_reference(family: Family, kernel: KernelSpec) -> None:
    """For all options, awkward shapes, numbers of every kind, views, and with the default options every dtype; for one
    operand and both; a product up to the order of its sums.

    ``LPQ_KERNELS`` names the backends whose kernels are compared; unset, all are. With ``TRITON_INTERPRET=1``, by which
    Triton runs its kernels on a CPU, those are compared there. A kernel of which nothing is compared is skipped, with
    the reason."""
    if kernel.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    check = check_of(kernel)
    refused, idle, served = "no quantizer that was tried has operands for it", None, False
    for quantizer in family.quantizers:
        for row, col in pairs(kernel, quantizer):
            reason = refusal(kernel, tuple(side for side in (row, col) if side is not None))
            if reason is not None:
                refused = reason
                continue
            dtypes = DTYPES if quantizer == family.default else DTYPES[:1]
            results = [
                check.compare(kernel, row, col, x, kernel.device, name)
                for name, x in matrices(dtypes, FEW if triton_interprets() else MANY)
                if not check.sums or name != SIZES
            ]
            results.append(check.views(kernel, row, col, kernel.device))
            served, idle = served or any(results), check.nothing
            if kernel.several is not None and row is not None:
                there(check.several, f"the check of {kernel.op} of several")(kernel, row, SHAPES, kernel.device)
            if kernel.rounds:
                for shape in SHAPES:
                    compare_rounded(kernel, row, col, normal(*shape), kernel.device, dtypes)
    if not served:
        pytest.skip(f"{kernel.impl}: {idle or refused}")


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
