"""The report names converted layers that no pass called, and counts them as not converted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize, prune
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM

import lpq


class Shared(nn.Module):
    """A module that calls two layers, and reads more of them; ``read`` gets the module, its input and its output."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.used, self.other, self.read = nn.Linear(32, 32), nn.Linear(32, 32), read

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.read(self, x)
        return y


class Past(Shared):
    """A module that reads the weight of a layer and does not call it."""

    def __init__(self) -> None:
        super().__init__(lambda m, x: functional.linear(m.used(x), m.other.weight, m.other.bias))


def past(policy: Any = "fp8-delayed", **how: Any) -> Any:
    return lpq.convert(Past(), policy, **how)


def both(read: Any) -> Any:
    """A module that calls both layers, and adds what it reads."""
    return nn.Sequential(Shared(lambda m, x: m.other(m.used(x)) + read(m, x)))


def weight_of(m: Any, x: Tensor) -> Tensor:
    return functional.linear(x, m.used.weight)


def uncalled(model: nn.Module) -> list[str]:
    report = lpq.report(model)
    names = [entry.name for entry in report.converted if "; no pass has called it so far, while others" in entry.note]
    assert names == [*report.uncalled]
    return names


@pytest.mark.parametrize("how", [{}, {"weights": "high_precision"}, {"weights": "quantized"}])
@pytest.mark.filterwarnings("ignore::lpq.core.PrecisionWarning")
def test_a_layer_whose_weight_is_read_and_that_is_not_called_is_named(how: Any) -> None:
    model = past("mxfp8", **how)
    assert uncalled(model) == []
    assert lpq.report(model).coverage.work == 1
    model(torch.randn(4, 32))
    assert uncalled(model) == ["other"]
    assert lpq.report(model).coverage.work == 0.5
    assert "2 converted, 0 left alone; 1 of the converted were not called so far" in str(lpq.report(model))
    model.other(torch.randn(4, 32))
    assert uncalled(model) == []


@pytest.mark.parametrize("how", [{}, {"weights": "high_precision"}, {"weights": "quantized"}])
@pytest.mark.filterwarnings("ignore::lpq.core.PrecisionWarning")
def test_a_layer_that_is_called_and_whose_weight_is_read_past_it_is_named(how: Any) -> None:
    model = both(weight_of)
    lpq.convert(model, "mxfp8", **how)
    assert lpq.report(model).read == ()
    model(torch.randn(4, 32))
    report = lpq.report(model)
    assert (report.read, report.uncalled, report.coverage.work) == (("0.used",), (), 1)
    assert "2 converted, 0 left alone; a pass has read the weights of 1 past them" in str(report)
    notes = {entry.name: entry.note for entry in report.converted}
    assert "; a pass has read its weight, too: what code beside the layer multiplies" in notes["0.used"]
    assert "has read" not in notes["0.other"]
    assert lpq.report(copy.deepcopy(model)).read == ()


@pytest.mark.parametrize(
    "read", [
        lambda m, x: x.to(m.used.weight.dtype) * m.other.weight.shape[0],
        lambda m, x: m.used(x) * len([*m.parameters()]),
        lambda m, x: functional.linear(x, m.used.bias[None].expand(32, 32)),
    ], ids=["dtype", "parameters", "bias"]
)  # fmt: skip
def test_what_multiplies_nothing_by_a_weight_is_not_named(read: Any) -> None:
    """Nor are reads outside of a pass, in a hook of the layer, and of the layer itself."""
    model = lpq.convert(both(read), "fp8-current")
    layer: Any = model[0].used
    layer.register_forward_hook(lambda layer, _args, _y: layer.weight.norm() and None)
    with lpq.hold_weights(model):
        model(torch.randn(4, 32))
    model(torch.randn(4, 32)).sum().backward()
    (layer.weight.square().sum() + layer.weight.grad.sum()).item()
    layer.recipe = None
    model(torch.randn(4, 32))
    layer.recipe = "mxfp8"
    assert lpq.report(model).read == ()


def test_weights_that_are_computed_or_absent_are_as_torch_has_them() -> None:
    layer: Any = lpq.nn.Linear(32, 32, recipe="mxfp8")
    x, values = torch.randn(4, 32), layer.weight
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    layer(x)
    parametrize.remove_parametrizations(layer, "weight")
    prune.l1_unstructured(layer, "weight", 0.5)
    layer(x)
    assert int((layer.weight == 0).sum()) == 512
    prune.remove(layer, "weight")
    del layer.weight
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'weight'"):
        layer.weight.sum()
    layer.weight = values
    layer(x)
    assert layer.weight is values


def test_a_weight_that_is_read_in_compiled_code_breaks_no_graph() -> None:
    model = lpq.convert(both(weight_of), "mxfp8")
    x = torch.randn(4, 32)
    compiled = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert torch.equal(compiled, model(x))


def test_what_ran_stays_so_and_a_copy_begins_anew() -> None:
    model = past()
    model(torch.randn(4, 32))
    assert uncalled(copy.deepcopy(model)) == []
    model.load_state_dict(model.state_dict())  # which has calls bound anew
    model.used.recipe = "mxfp8"
    assert uncalled(model) == ["other"]


def test_a_layer_that_waits_for_its_step_is_not_named() -> None:
    later = {"rules": [{"match": "other", "recipe": "skip", "until": 2}, {"match": "*", "recipe": "mxfp8"}]}
    model = past(later)
    model(torch.randn(4, 32))
    lpq.set_step(model, 2)
    assert uncalled(model) == []


@pytest.mark.parametrize("shape", [(4, 32), (0, 32)])
def test_passes_of_other_kinds_are_noted(shape: tuple[int, ...]) -> None:
    """In a mode, of rows in groups, and of experts."""
    model = past()
    with FlopCounterMode(display=False):
        model(torch.randn(shape))
    assert uncalled(model) == ["other"]
    grouped: Any = nn.ModuleList(lpq.nn.GroupedLinear(1, 32, 32, recipe="mxfp8") for _ in range(2))
    lpq.convert(grouped, "mxfp8")
    grouped[0](torch.randn(shape), [shape[0]])
    assert uncalled(grouped) == ["1"]
    assert lpq.report(grouped).read == ()


def test_experts_note_their_passes() -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    experts: dict[str, Any] = {"num_local_experts": 2, "intermediate_size": 32, "num_hidden_layers": 1}
    model = lpq.convert(MixtralForCausalLM(MixtralConfig(**sizes, **experts)), "mxfp8")
    model(torch.arange(8)[None])
    report = lpq.report(model)
    assert (uncalled(model), report.read) == ([], ())
    (name,) = (entry.name for entry in report.converted if "Experts" in entry.kind)
    block = model.get_submodule(name.rpartition(".")[0])
    block.register_forward_hook(lambda block, _x, _y: block.experts.gate_up_proj.sum() and None)
    model(torch.arange(8)[None])
    assert lpq.report(model).read == (name,)


def test_nothing_is_said_of_what_is_compiled() -> None:
    """Compiled code notes nothing: one block is traced, and others run what was compiled for it."""
    model: Any = lpq.convert(nn.Sequential(Past(), Past(), nn.Linear(32, 32)), "mxfp8")
    for block in model[:2]:
        block.compile(backend="eager", fullgraph=True)
    model(torch.randn(4, 32))
    assert model[0].used.passes.traced
    assert uncalled(model) == []
