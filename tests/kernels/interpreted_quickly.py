"""The interpreter that tests use has the results of Triton's own, to the bit."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from interpreted import SEED, _casts, numbers_of_all_sizes, values
from quick_interpreter import quick_interpreter, tl
from support.comparing import equal_bytes
from tile_sides import choose_triton
from torch import Tensor

import lpq
from lpq.testing.comparing import flat

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def casts() -> list[Tensor]:
    x = numbers_of_all_sizes()[:: 1 << 7]
    made = [torch.zeros(x.shape, dtype=torch.uint8) for _ in range(5)] + [torch.zeros(x.shape, dtype=torch.bfloat16)]
    _casts[(1,)](x, torch.arange(len(x)).to(torch.uint8), *made, N=len(x))
    return made


def operands(text: str) -> list[Tensor]:
    quantizer = lpq.quantizer(text)
    quantize = choose_triton("quantize", (text,), torch.device("cpu")).impl
    x = values(quantizer, torch.bfloat16)["all sizes"]
    return flat(quantize(x, [], quantizer.side("row"), quantizer.side("col"), torch.tensor(SEED), 16, True))


@pytest.mark.parametrize(
    "text", [None, "fp8(scaling=block)", "mxfp8", "mxfp4(scale=even, rht=true, stochastic=true)", "nvfp4"], ids=str
)
def test_results_are_those_of_the_interpreter_as_it_is(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it makes fewer types on the way, which shows that Triton still asks for them by the functions replaced."""
    made, make, results, counts = [], tl.block_type.__init__, [], []
    monkeypatch.setattr(tl.block_type, "__init__", lambda *args: (made.append(1), make(*args))[1])
    for quick in (False, True):
        made.clear()
        with quick_interpreter() if quick else nullcontext():
            results.append(casts() if text is None else operands(text))
        counts.append(len(made))
    assert equal_bytes(*results)
    assert any(t.any() for t in results[0])
    assert 0 < counts[1] < counts[0] / 2, counts
