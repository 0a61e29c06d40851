"""Several matrices that are encoded, measured or put in their places at once have, on a GPU, the bytes that each has by
itself."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from support import several as s

CUDA = torch.device("cuda", 0)
CASES: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    *((s.check_operands, (text, dtype, CUDA)) for text, dtype in product(s.ENCODED, s.DTYPES)),
    *(
        (s.check_tiled, (*side, dtype, CUDA, shapes))
        for side, shapes, dtype in product(s.TILED, (s.SHAPES, s.WHOLE), s.DTYPES)
    ),
    *((s.check_rows, (dtype, CUDA)) for dtype in s.DTYPES),
    *((s.check_statistics, (*side, dtype, CUDA)) for side, dtype in product(s.MEASURED, s.DTYPES)),
    (s.check_places, (CUDA,)),
    *((s.check_derived, (text, CUDA)) for text in s.TURNED),
    *((s.check_versions, (text, CUDA)) for text in s.ENCODED),
]


@pytest.mark.parametrize(("check", "given"), CASES)
def test_each_has_its_own(check: Callable[..., None], given: tuple[Any, ...]) -> None:
    check(*given)
