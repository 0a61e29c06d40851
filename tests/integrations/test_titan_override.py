"""torchtitan's own configurations and override mechanism, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import spawn
from support.comparing import equal_states
from torch import nn
from torch.distributed.fsdp import fully_shard

import lpq
from lpq import registry

pytest.importorskip("torchtitan", reason="needs torchtitan, which `make test-loops` brings")
pytestmark = [pytest.mark.slow, pytest.mark.starts]
TARGET = "lpq.integrations.torchtitan.linear"


def built(recipe: str | None = "mxfp8", **options: Any) -> nn.Module:
    """The debug model of Llama 3, with the same weights each time. Its attention needs a GPU."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel")
    if recipe is not None:
        done = apply_overrides(OverrideConfig(imports=[(TARGET, {"recipe": recipe, **options})]), spec)
        assert len(done) == 30
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_states(buffer_device=torch.device("cpu"))
    return model


class FeedForwards(nn.Module):
    """Those of all blocks, beside each other."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block.feed_forward for block in model.layers.values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([block(x) for block in self.blocks])


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    registry.refresh()


def step(model: nn.Module) -> dict[str, Any]:
    """Gradients of a step, by name."""
    model(torch.randn(64, 256, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed"])
def test_the_override_builds_the_model_that_convert_makes(recipe: str) -> None:
    plain, model = built(None), built(recipe)
    assert equal_states({n: t for n, t in model.state_dict().items() if "amax" not in n}, plain.state_dict())
    names = [entry.name for entry in lpq.report(model, full=True).converted]
    assert len(names) == 30
    assert all(name.startswith("layers.") for name in names)
    same = lpq.convert(built(None), recipe)  # by the module hook of this integration
    assert [entry.name for entry in lpq.report(same, full=True).converted] == names
    gradients = step(FeedForwards(model))
    assert equal_states(gradients, step(FeedForwards(same)))
    assert not equal_states(gradients, step(FeedForwards(plain)))


def test_subclasses_and_other_layers_are_not_claimed() -> None:
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel")
    apply_overrides(OverrideConfig(imports=[(TARGET, {"recipe": "mxfp8"})]), spec)
    assert type(spec.model.lm_head).__qualname__ == "Linear.Config"
    with pytest.raises(TypeError, match="recipes"):
        apply_overrides(OverrideConfig(imports=[(TARGET, {"recipes": "mxfp8"})]), model_registry("debugmodel"))


def _gathers_quantized(rank: int) -> None:
    whole = FeedForwards(built())
    expected = step(whole)
    for weights in (None, "high_precision"):
        model = FeedForwards(built("mxfp8", weights=weights))
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        gradients = {name: grad.full_tensor() for name, grad in step(model).items()}
        assert equal_states(gradients, expected)
        notes = [entry.note for entry in lpq.report(model).weights]
        assert bool(notes) == (weights is not None)
        assert all("gathered as" in note for note in notes)


def test_weights_are_gathered_quantized() -> None:
    spawn(_gathers_quantized, 2)
