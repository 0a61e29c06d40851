"""accelerate's optimizer stands for the one that it was made of, with masters too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lpq
from lpq import checkpoint
from lpq.core import QuantizedTensor
from lpq.optim import MasterWeights, load_high_precision

accelerate: Any = pytest.importorskip("accelerate", reason="needs accelerate, which `make install` brings")
X = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return lpq.convert(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), "mxfp8", weights="quantized")


def prepared(model: nn.Module, steps: int) -> Any:
    optimizer = accelerate.Accelerator(cpu=True).prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    optimizer.optimizer = MasterWeights(optimizer.optimizer)
    for _ in range(steps):
        (model(X) - X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def masters(optimizer: Any) -> list[torch.Tensor]:
    return [*getattr(optimizer, "optimizer", optimizer).masters.values()]


def decoded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def test_a_checkpoint_has_the_optimizer_for_which_it_stands(tmp_path: Path) -> None:
    model = net()
    optimizer = prepared(model, steps=2)
    checkpoint.save(model, tmp_path, optimizer, step=2)
    expected = copy.deepcopy(masters(optimizer))
    assert len(expected) == 2
    other = net()
    again = prepared(other, steps=1)
    checkpoint.load(other, tmp_path, again)
    assert all(map(torch.equal, masters(again), expected))
    own = net()
    alone = MasterWeights(torch.optim.AdamW(own.parameters(), lr=1e-2))
    checkpoint.load(own, tmp_path, alone)
    assert all(map(torch.equal, alone.masters.values(), expected))


def test_masters_are_filled_through_it() -> None:
    model, plain = net(), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    optimizer = prepared(model, steps=0)
    load_high_precision(model, plain.state_dict(), optimizer)
    assert all(map(torch.equal, masters(optimizer), (plain[0].weight, plain[2].weight)))
    with pytest.raises(TypeError, match=r"masters of a MasterWeights, and got a SGD: pass MasterWeights\(optimizer\)"):
        load_high_precision(model, plain.state_dict(), torch.optim.SGD(model.parameters()))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("weights", [None, "quantized"])
def test_a_run_goes_on_from_a_state_that_accelerate_saved(weights: Any, tmp_path: Path) -> None:
    """Its own files hold codes and masters, too. Control: safetensors does not, and refuses them."""

    def run(seed: int, first: int, saves: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        model = lpq.convert(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), "fp8-delayed", weights=weights)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, MasterWeights(optimizer) if weights else optimizer)
        if not saves:
            accelerator.load_state(tmp_path)
        for step in range(first, 4):
            if saves and step == 2:
                accelerator.save_state(tmp_path, safe_serialization=False)
                if weights:
                    with pytest.raises(TypeError, match="has no storage of its own"):
                        accelerator.save_state(tmp_path / "refused")
            (model(X + step) - X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}

    done, resumed = run(0, 0, saves=True), run(1, 2, saves=False)
    assert any("amax_history" in name for name in done)
    assert done.keys() == resumed.keys()
    assert all(torch.equal(decoded(value), decoded(resumed[name])) for name, value in done.items())
