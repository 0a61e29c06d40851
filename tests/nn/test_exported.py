"""A model that ``torch.export`` has taken: it runs as its layers do, and gives no gradient that is not theirs."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lpq

RECIPES = (
    *sorted(lpq.registry.recipes()),
    "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16",
    "fprop=bf16, dgrad=mxfp8, wgrad=fp8-current",
)


def exported(recipe: str, x: Tensor, strict: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(48, 32))
    lpq.convert(model, recipe)
    return model, torch.export.export(model, (x,), strict=strict).module()


def seeded(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    y: Tensor = model(x)
    return y


@pytest.mark.parametrize(
    ("recipe", "strict"),
    [*((recipe, False) for recipe in RECIPES), *((recipe, True) for recipe in (*RECIPES[-2:], "bf16"))],
)
def test_it_runs_with_weights_that_require_a_gradient(recipe: str, strict: bool) -> None:
    """Forward is the layer's to the bit; backward is right where all is in high precision, and else an error in words:
    a gradient that is missing, or another recipe's, would train something else in silence."""
    x = torch.randn(24, 48)
    model, module = exported(recipe, x, strict)
    y = seeded(module, x)
    assert torch.equal(y, seeded(model, x))
    assert y.requires_grad
    dy = torch.randn_like(y)
    if recipe != "bf16":
        with pytest.raises(RuntimeError, match=r"no gradient flows through torch\.ops\.lpq\.\w+: .*has forward only"):
            y.backward(dy)
        assert all(p.grad is None for p in module.parameters())
        return
    y.backward(dy)
    seeded(model, x).backward(dy)
    for mine, theirs in zip(module.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("recipe", [None, "nvfp4"])
def test_a_grouped_layer_gives_no_gradient_either(recipe: str | None) -> None:
    layer, x, offs = lpq.nn.GroupedLinear(2, 48, 32, recipe=recipe), torch.randn(24, 48), torch.tensor([9, 24]).int()
    module = torch.export.export(layer, (x, offs), strict=False).module()
    found = []
    for model in (module, layer):
        torch.manual_seed(7)
        found.append(model(x, offs))
    assert torch.equal(*found)
    with pytest.raises(RuntimeError, match=r"no gradient flows through torch\.ops\.lpq\.\w+: .*has forward only"):
        found[0].sum().backward()


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_saved_and_loaded(recipe: str) -> None:
    model, x, file = lpq.convert(nn.Sequential(nn.Linear(48, 32)), recipe), torch.randn(24, 48), BytesIO()
    rows = torch.export.Dim("rows", min=2, max=1000)
    torch.export.save(torch.export.export(model, (x,), dynamic_shapes=({0: rows},)), file)
    file.seek(0)
    module = torch.export.load(file).module()
    for given in (x, x[:7]):
        assert torch.equal(seeded(module, given), seeded(model, given))


@pytest.mark.slow
@pytest.mark.starts
def test_a_package_of_aotinductor_runs(tmp_path: Path) -> None:
    """Its runtime, which is no Python, passes None for the empty list of statistics."""
    model, x = lpq.convert(nn.Sequential(nn.Linear(48, 32)), "mxfp8").eval(), torch.randn(24, 48)
    with torch.no_grad():
        made = torch.export.export(model, (x,))
        path = torch._inductor.aoti_compile_and_package(made, package_path=str(tmp_path / "model.pt2"))
        assert torch.equal(torch._inductor.aoti_load_package(path)(x), model(x))


def test_it_encodes_only_what_forward_multiplies() -> None:
    """An inference graph has nothing of backward: of each tensor its row operand."""
    x = torch.randn(24, 48)
    _, module = exported("nvfp4", x, strict=False)
    encoded = [node for node in module.graph.nodes if node.target is torch.ops.lpq.quantize.default]
    assert [node.args[3] for node in encoded] == [""] * 2


@pytest.mark.parametrize("strict", [False, True])
def test_a_weight_that_is_stored_quantized_is_refused(strict: bool, tmp_path: Path) -> None:
    """PyTorch finds buffers that are no parameters, and asks for an issue to be filed. The remedy is exported."""
    x, model, plain = torch.randn(24, 48), nn.Sequential(nn.Linear(48, 32)), nn.Sequential(nn.Linear(48, 32))
    lpq.convert(model, "mxfp8", weights="quantized")
    words = r"layer 0, lpq\.nn\.Linear\(48, 32\): torch\.export takes no weight that is stored quantized\. .*import"
    with pytest.raises(RuntimeError, match=words):
        torch.export.export(model, (x,), strict=strict)
    lpq.export(model, tmp_path / "model.pt", layout="lpq", decode=True)
    lpq.checkpoint.import_file(lpq.convert(plain, "mxfp8"), tmp_path / "model.pt")
    assert torch.equal(torch.export.export(plain, (x,), strict=strict).module()(x), model(x))


def test_an_operator_runs_by_itself_where_a_gradient_is_wanted() -> None:
    """Also a body that no autograd could record, as it writes into tensors that it was handed. torch warns."""
    x = torch.randn(16, 32, requires_grad=True)
    data, *_ = torch.ops.lpq.quantize(x, [], "nvfp4", "", None, 0, False)
    assert data.dtype == torch.uint8
    decoded = torch.ops.lpq.decode([t.clone() for t in _codes(x)], "nvfp4", [16, 32], torch.float32, torch.float32)
    with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
        decoded.sum().backward()
    assert x.grad is None


def _codes(x: Tensor) -> list[Tensor]:
    made: list[Tensor] = torch.ops.lpq.quantize(x, [], "nvfp4", "", None, 0, False)
    return made
