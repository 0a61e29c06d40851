"""The rules around a bound kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lpq.operations import binding


def test_a_compiler_traces_layers_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which GPU is the current one is a question that it cannot trace, and need not be asked."""
    gpu = torch.device("cuda", 1)

    def ask() -> int:
        raise RuntimeError("asked")

    monkeypatch.setattr(binding.cuda, "current_device", ask)

    @torch.compile(backend="eager", fullgraph=True)
    def added(x: Tensor) -> Tensor:
        with binding.on_device(gpu):
            return x + 1

    assert torch.equal(added(torch.zeros(3)), torch.ones(3))
    with pytest.raises(RuntimeError, match="asked"):
        binding.on_device(gpu)
