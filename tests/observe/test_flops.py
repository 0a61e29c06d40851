"""PyTorch's counter counts a converted model as it counts the model before."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import grouped_mm
from torch.utils.flop_counter import FlopCounterMode

import lpq
from lpq.nn import GroupedLinear


def counted(model: nn.Module, **options: object) -> tuple[int, int]:
    """In forward, and in forward and backward."""
    x = torch.randn(48, 64, requires_grad=True)
    with FlopCounterMode(display=False, **options) as forward:  # type: ignore[arg-type]
        y = model(x)
    with FlopCounterMode(display=False, **options) as backward:  # type: ignore[arg-type]
        y.sum().backward()
    return forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4", "mxfp8-fwd-bf16-bwd", "bf16"])
def test_a_converted_model_counts_as_it_did_before(recipe: str) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    before = counted(model)
    assert before == (2 * 48 * (64 * 128 + 128 * 32), 6 * 48 * (64 * 128 + 128 * 32))
    lpq.convert(model, recipe)
    assert counted(model, custom_mapping=lpq.observe.FLOPS) == before


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8-fwd-bf16-bwd", None])
def test_products_of_experts_are_counted(recipe: str | None) -> None:
    """As torch's products in groups are then."""
    layer = GroupedLinear(3, 64, 32, bias=False, recipe=recipe)
    x, ends = torch.randn(40, 64, requires_grad=True), torch.tensor([24, 24, 40], dtype=torch.int32)
    for made in (lambda: layer(x, ends), lambda: grouped_mm(x, layer.weight.transpose(1, 2), offs=ends)):
        with FlopCounterMode(display=False, custom_mapping=lpq.observe.FLOPS) as counter:
            y = made()
            y.backward(torch.ones(40, 32))
        assert counter.get_total_flops() == 3 * 2 * 40 * 64 * 32
