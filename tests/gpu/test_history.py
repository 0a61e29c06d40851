"""The kernel that updates what delayed scaling remembers equals the reference."""

from __future__ import annotations

import pytest
import torch

import lpq
from lpq.kernels import choose


@pytest.mark.parametrize("history", [1, 2, 3, 1023, 1024, 1025, 4096])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, -1, 2, -127, 127])
def test_steps_are_remembered_alike(history: int, algo: str, margin: int) -> None:
    quantizer = lpq.quantizer("fp8", scaling="delayed", history=history, algo=algo, margin=margin)
    pytest.importorskip("cuda.core")
    choice = choose("remember", (quantizer.text,), torch.device("cuda"))
    assert choice.impl is not None
    ours, theirs = quantizer.new_state("cuda"), quantizer.new_state("cpu")
    generator = torch.Generator().manual_seed(0)
    special = [0.0, torch.inf, torch.nan, 1e-45, 3e38]
    for step in range(12):
        value = special[step % 7] if step % 7 < len(special) else torch.rand((), generator=generator).item()
        amax = torch.tensor(value)
        quantizer.remember(theirs, {"amax": amax})
        choice.impl(quantizer, ours, {"amax": amax.cuda()})
        for name, expected in theirs.items():
            assert torch.equal(ours[name].cpu().view(torch.int32), expected.view(torch.int32)), (step, name)
    assert theirs["amax_history"].count_nonzero() > 0
