"""The page for readers of the code names files that are there, and ten to begin with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from inspect import signature
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from imitated_gpu import imitated_gpu
from snippets import ROOT
from torch import Tensor, nn

import lpq
from lpq.kernels.cuda import CudaKernel
from lpq.nn import Layer
from lpq.nn.multiply import Multiplication
from lpq.registry import hookimpl

PAGE = (ROOT / "docs" / "reading.md").read_text()


def test_the_files_that_it_names_are_there() -> None:
    named = re.findall(r"`((?:lpq|plugins|csrc)/[\w/.]+)`", PAGE)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_what_it_says_of_them_stands_in_them() -> None:
    rows = re.findall(r"^\| \d+ \| `([\w/.]+)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 10
    for path, words in rows:
        source = (ROOT / path).read_text()
        for name in re.findall(r"`([\w.]+)`", words):
            if not name.endswith(".py"):
                assert name.rpartition(".")[2] in source, (path, name)


@pytest.mark.parametrize("page", ["reading", "design"])
def test_a_name_beside_a_file_is_defined_there(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    named = re.findall(r"`(\w+)`\s(?:\(|of\s|in\s)`((?:lpq|plugins)/[\w/]+\.py)`", text)
    assert len(named) > 5
    defined = r"^ *(?:class |def )?{}\b(?:\(|:| =)"
    assert [one for one in named if not re.search(defined.format(one[0]), (ROOT / one[1]).read_text(), re.M)] == []


def test_the_parts_that_features_hand_in_are_there() -> None:
    rows = re.findall(r"^\| [\w ,()]+ \| `([\w/.]+)` \| `(\w+)` as `(\w+)\.(\w+)` \((\d+)\) \|", PAGE, re.MULTILINE)
    assert len(rows) == 6
    ten = re.findall(r"^\| \d+ \| `([\w/.]+)` \|", PAGE, re.MULTILINE)
    for path, part, holder, field, number in rows:
        assert re.search(rf"^(class|def) {part}\b", (ROOT / path).read_text(), re.MULTILINE), (path, part)
        held = resolve_name(f"{ten[int(number) - 1].removesuffix('.py').replace('/', '.')}.{holder}")
        assert field in held._fields, (holder, field)
    (handed,) = re.findall(r"\| `Within` to 5, (.*) to 7 \|", PAGE)
    taken = {*signature(Multiplication.forward).parameters, *signature(Multiplication.backward).parameters}
    assert {*re.findall(r"`(\w+)`", handed)} <= taken


def test_it_has_the_tensors_that_its_recipe_keeps() -> None:
    recipe = lpq.recipe("fp8-current")
    assert "The example is `fp8-current`" in PAGE
    assert (recipe.save_x, recipe.save_w) == ("encoded", "weight")
    saved = " ".join(PAGE.split()).partition("**Backward.**")[0]
    assert "The column operand of `x` is saved for backward" in saved
    assert "`w.save=weight`: the weight is saved with its amax" in saved


@pytest.mark.parametrize(
    ("bias", "product"), [(False, "lpq.kernels.cublaslt._Plan.run"), (True, "lpq_fp8.gemm.scaled_matmul")]
)
def test_it_has_the_kernels_that_its_recipe_runs(bias: bool, product: str) -> None:
    """On Hopper, with kernels that do nothing."""
    assert "A layer without a bias calls cuBLASLt" in " ".join(PAGE.split())
    sources: list[str] = []
    products: list[str] = []
    with imitated_gpu(), pytest.MonkeyPatch.context() as patch:
        bind, multiply = CudaKernel.bind, resolve_name(product)

        def bound(kernel: CudaKernel, *how: Any) -> Any:
            sources.append(kernel.source.name)
            return bind(kernel, *how)

        def multiplied(*args: Any, **how: Any) -> Any:
            products.append(product)
            return multiply(*args, **how)

        patch.setattr(CudaKernel, "bind", bound)
        patch.setattr(product, multiplied)
        layer = lpq.nn.Linear(256, 256, bias=bias, dtype=torch.bfloat16, recipe="fp8-current")
        layer(torch.zeros(256, 256, dtype=torch.bfloat16))
    assert products == [product]
    assert "square.cu" in sources
    assert "`csrc/fp8/square.cu`" in PAGE


class Times(nn.Module):
    """A class of somebody else's, with what the docstring of ``Layer`` asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = 64, 32, None
        self.weight = nn.Parameter(torch.randn(32, 64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Multiplied(Layer, Times):
    kind = "acme.Times"


def test_a_class_of_the_docstring_of_layer_is_adopted() -> None:
    asked = " ".join(str(Layer.__doc__).split())
    assert "with a matrix ``weight``, ``bias`` (or None), ``in_features`` and ``out_features``" in asked
    x, module = torch.randn(16, 64), Times()
    expected = module(x)
    layer: Any = Multiplied.adopt(module, "identity")
    assert layer is module
    torch.testing.assert_close(layer(x), expected)
    assert layer.title == "acme.Times(64, 32)"


class Adopted(Layer, nn.Conv1d):
    in_features, out_features = 128, 64


class Unfolded(nn.Module):
    """A convolution of length 4, as a product."""

    def __init__(self, conv: nn.Conv1d, recipe: Any) -> None:
        super().__init__()
        self.product = lpq.nn.Linear(128, 64, bias=False, recipe=recipe)
        self.product.weight = nn.Parameter(conv.weight.detach().flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.product(x.unfold(2, 4, 1).permute(0, 2, 1, 3).flatten(2))
        return y.transpose(1, 2)


class Convolutions:
    @hookimpl
    def lpq_convert_module(self, module: nn.Module, fqn: str, recipe: Any) -> nn.Module | None:
        return Unfolded(module, recipe) if type(module) is nn.Conv1d else None


def test_a_convolution_has_a_linear_inside(register: Callable[..., object]) -> None:
    assert "the hook returns a module with an `lpq.nn.Linear` inside: a convolution unfolds its input" in PAGE
    x, net = torch.randn(2, 32, 35), nn.Sequential(nn.Conv1d(32, 64, 4, bias=False))
    expected = net(x)
    register(Convolutions(), name="acme")
    torch.testing.assert_close(lpq.convert(net, "identity")(x), expected)
    assert [entry.name for entry in lpq.report(net).converted] == ["0"]
    layer = Adopted.adopt(nn.Conv1d(32, 64, 4, bias=False), "mxfp8")
    with pytest.raises(ValueError, match=r"the weight is \[64, 32, 4\], and must be \[outputs, 128\]"):
        layer(torch.randn(2, 32, 128))


def test_its_files_are_about_as_long_as_it_says() -> None:
    paths = re.findall(r"^\| \d+ \| `([\w/.]+)` \|", PAGE, re.MULTILINE)
    lines = sum(len((ROOT / path).read_text().splitlines()) for path in paths)
    stated = re.search(r"some ([\d,]+) lines", PAGE)
    assert stated
    assert abs(lines - int(stated[1].replace(",", ""))) < 100


def test_the_glossary_is_short_and_its_words_are_used() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text().partition("## Glossary")[2]
    words = re.findall(r"^\| (\w+) \| ", page, re.MULTILINE)[1:]
    assert 10 < len(words) <= 15
    code = "\n".join(path.read_text() for path in (ROOT / "lpq").rglob("*.py")).lower()
    used = Counter(re.findall(r"\w+", code))
    assert [word for word in words if used[word] + used[f"{word}s"] < 20] == []


def test_no_page_has_another_word_for_a_product() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "lpq").rglob("*.py")]:
        assert not re.search(r"\bGEMMs?\b", path.read_text()), path
