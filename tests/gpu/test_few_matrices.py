"""Every CUDA kernel in all options, on few and small matrices: what compute-sanitizer has time for (``sanitized.py``).

The kit's own test tries each on many more; a sanitizer makes each of its launches a hundred times as slow.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lpq import registry
from lpq.core import Quantizer
from lpq.testing.calls import RAGGED, of_all_sizes
from lpq.testing.conformance.test_kernels import SIZES
from lpq.testing.kernel_checks import check_of, compared, pairs, refusal
from lpq.testing.operands import normal
from lpq.testing.options import family

pytest.importorskip("cuda.core", reason="needs cuda-core")

QUANTIZERS = [quantizer for name in ("nvfp4", "mxfp4", "fp8", "mxfp8") for quantizer in family(name).quantizers]


def few() -> Iterator[tuple[str, Tensor]]:
    """A ragged one with numbers of every kind, and whole tiles of another dtype."""
    x = of_all_sizes(torch.bfloat16)
    x[3, 70], x[20, 5] = torch.inf, torch.nan
    yield SIZES, x
    yield "whole tiles", normal(128, 256, dtype=torch.float32)
    yield "ragged", normal(*RAGGED)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_each_kernel_equals_the_reference(quantizer: Quantizer) -> None:
    served = set()
    for kernel in compared(quantizer):
        for row, col in pairs(kernel, quantizer) if kernel.backend == "cuda" else ():
            if refusal(kernel, tuple(side for side in (row, col) if side is not None)) is not None:
                continue
            results = [
                check_of(kernel).compare(kernel, row, col, x, "cuda", name)
                for name, x in few()
                if not check_of(kernel).sums or name != SIZES
            ]
            results.append(check_of(kernel).views(kernel, row, col, "cuda"))
            if any(results):
                served.add(kernel.op)
    assert served >= {"quantize", "measure", "decode"}, registry.format_of(type(quantizer)).name
