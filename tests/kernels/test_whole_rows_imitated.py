"""NVFP4 with an amax for each row: where a block of threads can hold a row, one kernel reads a matrix once, with the
bytes of the reference."""

from __future__ import annotations

import imitated
import pytest
import torch
from lpq_nvfp4 import cuda
from support.comparing import expect_bytes

import lpq
from lpq.operations.binding import Encoding
from lpq.operations.references import quantize_reference
from lpq.testing.comparing import Poisoned
from lpq.testing.operands import SEED, normal

pytestmark = [*imitated.MARKS, pytest.mark.usefixtures("launched")]
ONCE, TWICE = ["quantize_rows"], ["zero", "amax", "quantize"]
BETTER = "nvfp4(scaling=row, search=four_over_six, norm=256)"


@pytest.mark.parametrize(
    ("text", "shape", "dtype", "launches"),
    [
        ("nvfp4(scaling=row)", (1, 16), torch.bfloat16, ONCE),
        ("nvfp4(scaling=row)", (67, 48), torch.float32, ONCE),  # several rows of warps
        (BETTER, (37, 1024), torch.bfloat16, ONCE),
        ("nvfp4(scaling=row)", (16, 1024), torch.bfloat16, ONCE),  # whole tiles
        ("nvfp4(scaling=row)", (8, 2304), torch.float16, ONCE),  # a warp has two tiles, the others one
        (BETTER, (9, 4096), torch.float32, ONCE),
        ("nvfp4(scaling=row, stochastic=unbiased)", (8, 8192), torch.bfloat16, ONCE),
        ("nvfp4(scaling=row)", (3, 6000), torch.bfloat16, ONCE),
        ("nvfp4(scaling=row)", (3, 8193), torch.bfloat16, TWICE),
        ("nvfp4(scaling=row)", (3, 4097), torch.float32, TWICE),
    ],
)  # fmt: skip
def test_rows_that_fit_are_read_once(
    text: str, shape: tuple[int, int], dtype: torch.dtype, launches: list[str], launched: list[str]
) -> None:
    q, x, seed = lpq.quantizer(text), normal(*shape, dtype=dtype), torch.tensor(SEED)
    x[shape[0] // 3] = 0
    x[-1, 5], x[shape[0] // 2, -1] = torch.inf, torch.nan
    for measure, offset in ((False, 0), (True, 16)):
        e = Encoding(q, None, shape, dtype, dtype, x.device, measure=measure, offset=offset)
        encode = cuda.bind(e)
        assert encode is not None
        launched.clear()
        with Poisoned():
            row, _, measured = encode(x, x.data_ptr(), (), seed)
        assert launched == launches
        expected = quantize_reference(x, [], q, None, seed, offset, measure)
        expect_bytes([*row, *measured], expected, f"{text}, {shape}, measure {measure}")


def test_a_matrix_is_rounded_as_it_is_held(launched: list[str]) -> None:
    """Twice as many elements of fp32 fit where they are rounded to bf16 first; amaxes that are given are not found."""
    q, x = lpq.quantizer("nvfp4(scaling=row)"), normal(5, 8192)
    e = Encoding(q, None, (5, 8192), x.dtype, torch.bfloat16, x.device)
    encode = cuda.bind(e)
    assert encode is not None
    with Poisoned():
        row, _, _ = encode(x, x.data_ptr(), (), None)
    assert launched == ONCE
    expected = quantize_reference(x.bfloat16(), [], q, None, None, 0, True)
    expect_bytes(row, expected[:3], "rounded")
    given = cuda.bind(e._replace(given=(True, False)))
    assert given is not None
    launched.clear()
    row, _, _ = given(x, x.data_ptr(), (expected[3], None), None)
    assert launched == ["quantize"]
    expect_bytes(row, expected[:3], "given")
